"""Texts without drafts: the target goes on by itself, and is asked for more in time."""

from __future__ import annotations

import grpc
import pytest

from tandem.target.v1 import target_pb2
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeTarget, orchestrate, request

PLAIN = {"gamma": 0}


@pytest.mark.parametrize("max_rounds", [0, 1, 2, 32])
async def test_a_text_is_the_same_however_many_rounds_are_asked_for_at_once(
    max_rounds: int,
) -> None:
    """0 is a target of a release that has no runs."""
    target = FakeTarget()
    target.max_rounds = max_rounds
    async with orchestrate(target) as stub:
        stopping = {"max_new_tokens": 100}
        reply = await stub.Complete(request(stopping=stopping, speculation=PLAIN))
    assert list(reply.token_ids) == target.text(100)
    assert sum(target.runs) == (99 if max_rounds > 1 else 0)
    assert all(count <= max_rounds for count in target.runs)
    if max_rounds == 32:
        assert len(target.runs) < 20


async def test_a_target_ends_a_run_where_the_text_ends() -> None:
    target = FakeTarget()
    rounds: list[int] = []

    async def count(at: int | None, context: FakeContext) -> None:
        if at is not None:
            rounds.append(at)

    target.interfere = count
    async with orchestrate(target) as stub:
        stopping = {"max_new_tokens": 100, "stop_token_ids": [7]}
        reply = await stub.Complete(request(stopping=stopping, speculation=PLAIN))
    text = target.text(100)
    assert list(reply.token_ids) == text[: text.index(7) + 1]
    assert list(target.openings[0].end_token_ids) == [7]
    assert len(rounds) == text.index(7)


async def test_a_target_that_is_lost_amid_a_run_loses_no_token_and_uses_no_number_twice() -> None:
    """Rounds that it may have decided ahead were never seen: their numbers are left out."""
    targets = FakeTarget(), FakeTarget()
    dead: list[FakeTarget] = []

    def die_once(fake: FakeTarget) -> None:
        async def die(at: int | None, context: FakeContext) -> None:
            if at == 20 and not dead:
                dead.append(fake)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        fake.interfere = die

    for fake in targets:
        die_once(fake)
    async with orchestrate(*targets) as stub:
        stopping = {"max_new_tokens": 100}
        reply = await stub.Complete(request(stopping=stopping, speculation=PLAIN))
    assert list(reply.token_ids) == FakeTarget().text(100)
    (first,), (second,) = dead, [fake for fake in targets if fake not in dead]
    assert sum(first.runs) >= 20
    assert second.openings[0].first_round > sum(first.runs)
    assert len(second.openings[0].token_ids) == 1 + 20


async def test_a_target_that_says_more_than_it_was_asked_for_is_not_heard() -> None:
    """A verdict of a round that is not the next one ends the text's sequence."""
    target = FakeTarget()

    def skip(reply: target_pb2.SequenceResponse) -> None:
        if reply.verdict.round == 5:
            reply.verdict.round = 6

    target.alter = skip
    async with orchestrate(target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request(speculation=PLAIN))
    assert failed.value.code() is grpc.StatusCode.INTERNAL
