"""A text of the client goes on without drafts where its drafter fails, unless it asked to be
repeatable."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import tandem
from orchestrator.front.service import make_service
from tandem.rpc.server import RunningServer
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, serve_fakes


@pytest.mark.parametrize("seeded", [False, True])
async def test_a_drafter_that_always_fails(seeded: bool) -> None:
    drafter = FakeDrafter()

    async def fail(round_: int | None, context: FakeContext) -> None:
        if round_ is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    drafter.interfere = fail
    asked: dict[str, Any] = {"max_new_tokens": 20, "gamma": 4} | ({"seed": 3} if seeded else {})
    async with serve_fakes(drafter, FakeTarget(), queue_seconds=0.2) as settings:
        server = RunningServer("127.0.0.1:0", make_service(settings))
        await server.start()
        await server.ready()
        try:
            client = tandem.AsyncClient(f"127.0.0.1:{server.port}", resume_seconds=0.0)
            async with client:
                if seeded:
                    with pytest.raises(tandem.Lost, match="waits for its drafter"):
                        await client.generate([1], **asked)
                    return
                text = await client.generate([1], **asked)
        finally:
            await server.stop(0.0)
    assert len(text.tokens) == 20
    assert text.summary.drafter_lost
