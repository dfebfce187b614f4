"""A target that is lost in the middle of a text: another one goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tandem.common.v1 import common_pb2
from tandem.target.v1 import target_pb2
from tests.service.fakes import FakeContext, FakeDrafter, FakeTarget, orchestrate, request

GREEDY_BLOCK = {"verifier": "greedy_block", "gamma": 4}
CARRY = common_pb2.VerifierCarry(
    levels=[common_pb2.VerifierCarry.Level(log_ratio=0.5, count=2)],
)


class Pair:
    """Two targets, of which whichever serves first is lost at a round."""

    def __init__(self, at: int | None, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self.targets = FakeTarget(), FakeTarget()
        self.seen: list[tuple[int, target_pb2.VerifyStep]] = []
        self._lost: FakeContext | None = None
        for target in self.targets:

            async def lose(round_: int | None, context: FakeContext) -> None:
                if round_ == at and self._lost is None:
                    self._lost = context
                    await context.abort(code, "gone")

            target.interfere = lose

    @property
    def openings(self) -> list[target_pb2.OpenSequence]:
        """Of both; the lost one's first."""
        return sorted(
            (opening for target in self.targets for opening in target.openings),
            key=lambda opening: opening.first_round,
        )


@pytest.mark.parametrize("at", [None, 1, 3])
async def test_another_target_goes_on_from_what_was_emitted(at: int | None) -> None:
    pair, drafter = Pair(at), FakeDrafter()
    async with orchestrate(drafter, *pair.targets) as stub:
        call = await stub.Complete(request())
    expected = pair.targets[0].text(20)
    assert list(call.token_ids) == expected
    assert not call.summary.drafter_lost
    last = pair.openings[-1]
    if at is not None:
        first = pair.openings[0]
        # The lost round's number is not used again.
        assert (first.first_round, last.first_round) == (0, at + 1)
        emitted = len(last.token_ids) - 1
        assert list(last.token_ids) == [1, *expected[:emitted]]
        assert last.max_new_tokens == 20 - emitted
        assert last.sampling.seed == first.sampling.seed
        # Its draft was decided by nobody; the next target's prefill gave a token instead.
        assert list(call.summary.gammas)[at] == 0
    assert sum(target.ended for target in pair.targets) == 2
    assert drafter.ended == 1


async def test_the_carry_is_handed_on_and_the_draft_with_it() -> None:
    """A carry modifies the next position, so its rows are needed there: the draft stays."""
    pair, drafter = Pair(3), FakeDrafter()

    def owe(reply: Any) -> None:
        kind = reply.WhichOneof("result")
        if kind in ("opened", "verdict"):
            getattr(reply, kind).carry.CopyFrom(CARRY)

    for target in pair.targets:
        target.alter = owe
    async with orchestrate(drafter, *pair.targets) as stub:
        reply = await stub.Complete(request(speculation=GREEDY_BLOCK))
    assert list(reply.token_ids) == pair.targets[0].text(20)
    first, last = pair.openings
    assert not first.HasField("carry")
    assert last.carry == CARRY
    assert last.gamma == 4
    assert list(reply.summary.gammas)[3] == 4


async def test_without_another_target_the_text_fails() -> None:
    target, tries = FakeTarget(), 0

    async def lose(round_: int | None, context: FakeContext) -> None:
        nonlocal tries
        if round_ == 2:
            tries += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    target.interfere = lose
    async with orchestrate(FakeDrafter(), target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request())
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert (tries, target.opened) == (1, 1)


async def test_each_target_is_tried_once() -> None:
    targets = FakeTarget(), FakeTarget(), FakeTarget()

    async def lose(round_: int | None, context: FakeContext) -> None:
        if round_ is None or round_ > 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    for target in targets:
        target.interfere = lose
    async with orchestrate(FakeDrafter(), *targets) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request())
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert [target.opened for target in targets] == [1, 1, 1]


async def test_a_target_that_finds_fault_is_not_replaced() -> None:
    """Its refusal may be of the draft, and a draft that is withdrawn for what it is biases."""
    pair = Pair(2, grpc.StatusCode.INVALID_ARGUMENT)
    async with orchestrate(FakeDrafter(), *pair.targets) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request())
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert sum(target.opened for target in pair.targets) == 1


async def test_a_hung_target_is_replaced() -> None:
    pair, hung = Pair(99), 0

    async def hang(round_: int | None, context: FakeContext) -> None:
        nonlocal hung
        if round_ == 2 and not hung:
            hung += 1
            await asyncio.sleep(60)

    for target in pair.targets:
        target.interfere = hang
    async with orchestrate(FakeDrafter(), *pair.targets, verify_seconds=0.3) as stub:
        reply = await stub.Complete(request(), timeout=10)
    assert list(reply.token_ids) == pair.targets[0].text(20)
