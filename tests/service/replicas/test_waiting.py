"""Texts with a seed and a draft length: they wait for their drafter, since they repeat only so."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

EXPECTED = FakeTarget().text(20)
SEEDED: dict[str, Any] = {"sampling": {"seed": 7}}


def hold(fake: FakeDrafter) -> asyncio.Event:
    """Its texts wait in their first round until the event is set."""
    go_on = asyncio.Event()

    async def wait(at: int | None, context: FakeContext) -> None:
        if at is not None:
            await go_on.wait()

    fake.interfere = wait
    return go_on


async def test_a_text_waits_for_a_place_on_its_drafter() -> None:
    drafter, target = FakeDrafter(max_sequences=1), FakeTarget()
    async with orchestrate(drafter, target, queue_seconds=HANG_SECONDS) as stub:
        replies = await asyncio.gather(*(stub.Complete(request(**SEEDED)) for _ in range(6)))
    assert all(list(reply.token_ids) == EXPECTED for reply in replies)
    assert [reply.summary.undrafted_rounds for reply in replies] == [0] * 6
    assert not any(reply.summary.drafter_lost for reply in replies)
    assert len({tuple(reply.summary.gammas) for reply in replies}) == 1
    assert drafter.opened == 6


@pytest.mark.parametrize(
    ("wanted", "waits"),
    [
        (SEEDED, True),
        ({}, False),  # a seed is drawn
        ({"sampling": {"seed": 7}, "speculation": {}}, False),  # a length is chosen
        ({"sampling": {"seed": 7}, "speculation": {"gamma": 0}}, False),
    ],
)
async def test_only_what_must_repeat_waits(wanted: dict[str, Any], waits: bool) -> None:
    drafter, target = FakeDrafter(max_sequences=1), FakeTarget()
    async with orchestrate(drafter, target, queue_seconds=HANG_SECONDS) as stub:
        go_on = hold(drafter)
        first = asyncio.ensure_future(stub.Complete(request(**SEEDED)))
        await until(lambda: drafter.opened == 1)
        text = asyncio.ensure_future(stub.Complete(request(**wanted)))
        if waits:
            await until(lambda: target.opened == 1)
        else:
            await asyncio.wait_for(asyncio.shield(text), HANG_SECONDS)
        assert not first.done()
        assert drafter.opened == 1
        go_on.set()
        assert list((await text).token_ids) == list((await first).token_ids) == EXPECTED


async def test_who_waits_in_vain_is_told_what_for() -> None:
    drafter, target = FakeDrafter(max_sequences=1), FakeTarget()
    async with orchestrate(drafter, target, queue_seconds=0.2) as stub:
        go_on = hold(drafter)
        first = asyncio.ensure_future(stub.Complete(request(**SEEDED)))
        await until(lambda: drafter.opened == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request(**SEEDED))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "waits for its drafter, and none had room for 0.2 s" in str(refused.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Complete(request(**SEEDED), timeout=0.5)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        go_on.set()
        await first
        # Nothing is left of them.
        assert list((await stub.Complete(request(**SEEDED))).token_ids) == EXPECTED


async def test_who_waits_for_a_drafter_that_failed_is_told_so() -> None:
    """It had room: to name that would send people to look for the wrong thing."""
    drafter, target = FakeDrafter(), FakeTarget()
    drafter.passes_trials = False

    async def fail(at: int | None, context: FakeContext) -> None:
        if at is not None:
            await context.abort(grpc.StatusCode.INTERNAL, "ValueError of 10.0.0.7")

    drafter.interfere = fail
    async with orchestrate(drafter, target, queue_seconds=0.2) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request(**SEEDED))
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        said = str(failed.value.details())
        assert "waits for its drafter, and it failed (" in said
        assert "no other came in 0.2 s; try again, or leave out seed or gamma" in said
        assert "room" not in said
        assert "10.0.0.7" not in said
        # What must not repeat goes on without.
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == EXPECTED


async def test_a_round_that_loses_its_drafter_is_plain_and_the_next_one_waits() -> None:
    """Another draft in its place would leave out drafts for what they hold."""
    drafter, target = FakeDrafter(), FakeTarget()
    dying = iter([2, 4])
    death = next(dying)

    async def die(at: int | None, context: FakeContext) -> None:
        nonlocal death
        if at == death:
            death = next(dying, -1)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with orchestrate(drafter, target, queue_seconds=HANG_SECONDS) as stub:
        drafter.interfere = die
        reply = await stub.Complete(request(stopping={"max_new_tokens": 40}, **SEEDED))
    assert death == -1
    assert list(reply.token_ids) == target.text(40)
    # The last round has one token left, and wants no draft.
    undrafted = [at for at, gamma in enumerate(reply.summary.gammas[:-1]) if not gamma]
    assert undrafted == [0, 2, 4]
    assert reply.summary.undrafted_rounds == 2
    assert reply.summary.drafter_lost


async def test_a_drafter_that_opens_no_text_fails_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.peers.replicas.breaker._AGAIN_SECONDS", 0.0)
    drafter, target = FakeDrafter(), FakeTarget()

    async def refuse(at: int | None, context: FakeContext) -> None:
        if at is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    drafter.interfere = refuse
    async with orchestrate(drafter, target, queue_seconds=HANG_SECONDS) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request(**SEEDED))
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "waits for its drafter, which failed 8 times" in str(failed.value.details())
    assert drafter.opened >= 8  # and to answer probes


async def test_a_drafter_that_others_filled_is_asked_until_it_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when another orchestrator took its last place."""
    monkeypatch.setattr("tandem.peers.replicas.replica._FULL_SECONDS", 0.0)
    drafter, target = FakeDrafter(), FakeTarget()
    refusals = 0

    async def refuse(at: int | None, context: FakeContext) -> None:
        nonlocal refusals
        if at is None and refusals < 20:
            refusals += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    drafter.interfere = refuse
    async with orchestrate(drafter, target, queue_seconds=HANG_SECONDS) as stub:
        reply = await stub.Complete(request(**SEEDED))
    assert (refusals, reply.summary.undrafted_rounds) == (20, 0)
    assert list(reply.token_ids) == EXPECTED


async def test_a_drafter_that_heard_nothing_for_long_is_asked_again_in_the_same_round() -> None:
    """While the target had no room for the text, say. Nothing was drawn for the round."""
    drafter, target = FakeDrafter(), FakeTarget()
    idled: list[int] = []

    async def idle(at: int | None, context: FakeContext) -> None:
        if at == 3 and not idled:
            idled.append(at)
            await context.abort(grpc.StatusCode.ABORTED, "no request for 150 s")

    drafter.interfere = idle
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request(**SEEDED))
    assert list(reply.token_ids) == EXPECTED
    assert (idled, reply.summary.undrafted_rounds, drafter.opened) == ([3], 0, 2)
