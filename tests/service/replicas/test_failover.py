"""Which texts pay for a replica that hangs or is away, and when a replica is used again."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

EXPECTED = FakeTarget().text(20)
HEALTH = health_pb2.HealthCheckResponse


def hang_from(fake: FakeDrafter | FakeTarget, round_: int) -> None:
    """It answers nothing from a round on, probes neither; its health says SERVING."""

    async def hang(at: int | None, context: FakeContext) -> None:
        if at is not None and at >= round_:
            await asyncio.sleep(60)

    fake.interfere = hang
    fake.passes_trials = False


def heal(fake: FakeDrafter | FakeTarget) -> None:
    async def answer(at: int | None, context: FakeContext) -> None: ...

    fake.interfere = answer
    fake.passes_trials = True


async def test_of_a_drafter_that_hangs_alone_the_first_text_pays() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    hang_from(drafter, 1)
    async with orchestrate(drafter, target, draft_seconds=0.2, connect_seconds=0.2) as stub:
        for _ in range(5):
            reply = await stub.Complete(request(), timeout=HANG_SECONDS)
            assert list(reply.token_ids) == EXPECTED
            assert reply.summary.drafter_lost
        assert drafter.opened == 1
        heal(drafter)
        async with asyncio.timeout(HANG_SECONDS):
            while not (await stub.Complete(request())).summary.accepted_tokens:
                pass


async def test_a_target_that_hangs_is_left_after_what_stages_take() -> None:
    """Not after the longest that they may take; and no other text goes there."""
    targets = FakeTarget(), FakeTarget()
    waits: dict[str, Any] = {
        "verify_seconds": 60.0,
        "stage_floor_seconds": 0.1,
        "connect_seconds": 0.2,
    }
    async with orchestrate(FakeDrafter(), *targets, **waits) as stub:
        for _ in range(4):
            await stub.Complete(request())
        assert all(target.opened for target in targets)
        hung = targets[0]
        hang_from(hung, 2)
        before = hung.opened
        for _ in range(6):
            reply = await stub.Complete(request(), timeout=HANG_SECONDS)
            assert list(reply.token_ids) == EXPECTED
        assert hung.opened <= before + 1
        heal(hung)
        async with asyncio.timeout(HANG_SECONDS):
            while hung.opened <= before + 1:
                await stub.Complete(request())


async def test_a_target_alone_has_as_long_as_it_may_take() -> None:
    """To give it up would end the text."""
    target = FakeTarget()
    async with orchestrate(FakeDrafter(), target, stage_floor_seconds=0.05) as stub:
        await stub.Complete(request())

        async def slow(at: int | None, context: FakeContext) -> None:
            if at == 2:
                await asyncio.sleep(0.5)

        target.interfere = slow
        assert list((await stub.Complete(request())).token_ids) == EXPECTED
        assert target.opened == 2


@pytest.mark.parametrize("drafters", [1, 2])
async def test_speculation_resumes_with_another_drafter_or_the_same(drafters: int) -> None:
    """Within the text that lost one."""
    fakes = [FakeDrafter() for _ in range(drafters)]
    target = FakeTarget()
    lost: list[FakeDrafter] = []

    def die_once(fake: FakeDrafter) -> None:
        async def die(at: int | None, context: FakeContext) -> None:
            if at == 2 and not lost:
                lost.append(fake)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        fake.interfere = die

    for fake in fakes:
        die_once(fake)

    async def breathe(at: int | None, context: FakeContext) -> None:
        await asyncio.sleep(0.02)

    target.interfere = breathe
    async with orchestrate(*fakes, target) as stub:
        reply = await stub.Complete(request(stopping={"max_new_tokens": 100}))
    assert list(reply.token_ids) == target.text(100)
    assert reply.summary.drafter_lost
    gammas = list(reply.summary.gammas)
    assert gammas[2] == 0
    assert any(gammas[3:])
    assert sum(fake.opened for fake in fakes) == 2
    if drafters == 2:
        assert [fake.opened for fake in fakes] == [1, 1]


async def test_a_text_gives_up_on_drafters_that_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.peers.replicas.breaker._AGAIN_SECONDS", 0.0)
    drafter, target = FakeDrafter(), FakeTarget()

    async def die(at: int | None, context: FakeContext) -> None:
        if at is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async def breathe(at: int | None, context: FakeContext) -> None:
        await asyncio.sleep(0.01)

    drafter.interfere, target.interfere = die, breathe
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request(stopping={"max_new_tokens": 100}))
    assert list(reply.token_ids) == target.text(100)
    assert 2 <= drafter.opened <= 8


async def test_a_drafter_that_is_full_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks it again for a moment, and then the next text does: no hold grows."""
    moment = "tandem.peers.replicas.replica._FULL_SECONDS"
    drafter, target = FakeDrafter(), FakeTarget()

    async def refuse(at: int | None, context: FakeContext) -> None:
        if at is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    async def complete(stub: Any) -> bool:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == EXPECTED
        return bool(reply.summary.drafter_lost)

    drafter.interfere = refuse
    async with orchestrate(drafter, target) as stub:
        monkeypatch.setattr(moment, 1e6)
        assert [await complete(stub) for _ in range(3)] == [True] * 3
        assert drafter.opened == 1
        for _ in range(3):  # the moment is over, each time
            monkeypatch.setattr(moment, 0.0)
            before = drafter.opened
            assert await complete(stub)
            assert drafter.opened > before
        heal(drafter)
        assert not await complete(stub)
        assert drafter.tried == 0


async def test_more_texts_than_a_drafter_has_places_do_not_wait_for_it() -> None:
    drafter, target = FakeDrafter(max_sequences=1), FakeTarget()

    async def breathe(at: int | None, context: FakeContext) -> None:
        await asyncio.sleep(0.01)

    target.interfere = breathe
    async with orchestrate(drafter, target) as stub:
        replies = await asyncio.gather(*(stub.Complete(request()) for _ in range(4)))
    assert all(list(reply.token_ids) == EXPECTED for reply in replies)
    assert sorted(reply.summary.drafter_lost for reply in replies) == [False, True, True, True]
    for summary in (reply.summary for reply in replies):
        # Each round but the first wants a draft, and a last one for a single token; those that had
        # none are told. A last round without a draft is for a single token.
        undrafted = sum(gamma == 0 for gamma in summary.gammas[1:-1])
        assert summary.undrafted_rounds == undrafted
        assert bool(undrafted) == summary.drafter_lost
    assert drafter.tried == 0


async def test_a_target_alone_that_was_cut_off_goes_on_when_it_has_answered() -> None:
    target = FakeTarget()

    async def die(at: int | None, context: FakeContext) -> None:
        if at == 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    target.interfere = die
    async with orchestrate(FakeDrafter(), target, failover_seconds=10.0) as stub:
        reply = await stub.Complete(request())
    assert list(reply.token_ids) == EXPECTED
    assert (target.opened, target.tried) == (2, 1)


async def test_a_target_that_fails_a_text_twice_is_not_tried_a_third_time() -> None:
    target = FakeTarget()

    async def die(at: int | None, context: FakeContext) -> None:
        if at is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    target.interfere = die
    async with orchestrate(FakeDrafter(), target, failover_seconds=1.0) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request())
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert target.opened == 2


@pytest.mark.parametrize("patient", [True, False])
async def test_a_text_waits_a_moment_for_a_target_that_is_back_soon(patient: bool) -> None:
    target = FakeTarget()
    seconds = 10.0 if patient else 0.0
    async with orchestrate(FakeDrafter(), target, failover_seconds=seconds) as stub:
        await stub.Complete(request())
        name = "tandem.target.v1.TargetService"
        await target.health.set(name, HEALTH.NOT_SERVING)
        await asyncio.sleep(0.1)
        call = asyncio.ensure_future(stub.Complete(request()))
        await asyncio.sleep(0.1)
        assert call.done() is not patient
        await target.health.set(name, HEALTH.SERVING)
        if patient:
            assert list((await call).token_ids) == EXPECTED
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_who_has_restarted_is_asked_anew_before_a_text_is_read() -> None:
    """Another process may have come to listen between the question and an opening."""
    drafter, target = FakeDrafter(incarnation=1), FakeTarget(incarnation=1)
    for fake in (drafter, target):

        def say(reply: Any, fake: FakeDrafter | FakeTarget = fake) -> None:
            if reply.HasField("opened"):
                reply.opened.incarnation = fake.info.incarnation

        fake.alter = say
    async with orchestrate(drafter, target, failover_seconds=10.0) as stub:
        await stub.Complete(request())
        asked = target.asked
        for fake in (drafter, target):
            fake.info.incarnation = 2
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == EXPECTED
        assert target.asked == asked + 1
        assert target.opened == 3  # the one that was not read among them
        # The drafter's turn: nobody reads a draft of whom nobody asked.
        await until(lambda: drafter.tried)
        assert reply.summary.drafter_lost
        assert not (await stub.Complete(request())).summary.drafter_lost


async def test_who_ended_a_silent_sequence_has_not_failed() -> None:
    """A full service takes places back from texts that a client reads slowly: they go on there, and
    others are not kept away."""
    drafter, target = FakeDrafter(), FakeTarget()
    for fake, at in ((drafter, 2), (target, 3)):
        rounds = iter([at])

        async def end_once(
            round_: int | None, context: FakeContext, rounds: Any = rounds, at: int = at
        ) -> None:
            if round_ is not None and round_ >= at and next(rounds, None):
                await context.abort(grpc.StatusCode.ABORTED, "no request for 15 s")

        fake.interfere = end_once
        fake.passes_trials = False  # a replica that is taken to have failed stays away
    async with orchestrate(drafter, target, connect_seconds=0.2) as stub:
        for texts in (1, 2):
            reply = await stub.Complete(request(), timeout=HANG_SECONDS)
            assert list(reply.token_ids) == EXPECTED
            assert reply.summary.drafter_lost == (texts == 1)
            assert target.opened == 1 + texts
        assert drafter.opened == 3
