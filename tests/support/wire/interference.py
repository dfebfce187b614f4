"""Interference with a fake target's rounds before their verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeTarget


def at_round(target: FakeTarget, number: int, do: Callable[[FakeContext], Awaitable[None]]) -> None:
    """Call `do` before the verdict of a round."""

    async def interfere(round_: int | None, context: FakeContext) -> None:
        if round_ == number:
            await do(context)

    target.interfere = interfere


async def stand_still(context: FakeContext) -> None:
    await asyncio.sleep(60)
