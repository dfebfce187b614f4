"""Texts whose memory is needed for older ones: they wait, and go on as if they had stayed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

TEXTS, TOKENS = 8, 60


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left for texts to grow, for texts as short as these."""
    monkeypatch.setattr("tandem.engine.admission.HEADROOM", 8)
    monkeypatch.setattr("tandem.serving.sequence._BEGINS_WITH", 4)


@asynccontextmanager
async def small_caches(
    pair: tuple[Path, Path], target: dict[str, Any], drafter: dict[str, Any]
) -> AsyncIterator[Any]:
    """A stub over services whose caches do not hold all texts."""
    drafting, scoring = map(str, pair)
    common: dict[str, Any] = {"max_sequences": TEXTS, "max_length": 128, "admission_seconds": 0.05}
    async with AsyncExitStack() as stack:
        one = await start(
            stack, make_drafter(DrafterSettings(**common | {"model": drafting} | drafter))
        )
        other = await start(
            stack, make_target(TargetSettings(**common | {"model": scoring} | target))
        )
        own = OrchestratorSettings(
            drafters=(address_of(one),), targets=(address_of(other),), draft_seconds=60.0
        )
        server = await start(stack, make_orchestrator(own))
        await server.ready()
        yield orchestrator_pb2_grpc.OrchestratorServiceStub(
            await connect(stack, address_of(server))
        )


async def text(stub: Any, number: int, speculation: dict[str, Any], **sampling: Any) -> Any:
    return await stub.Complete(
        request(
            prompt_token_ids=[1, 2, 3, number % 5],
            stopping=pb.Stopping(max_new_tokens=TOKENS, ignore_eos=True),
            sampling=sampling,
            speculation=pb.Speculation(**speculation),
        )
    )


@pytest.mark.parametrize(
    ("speculation", "target"),
    [
        ({"gamma": 0}, {}),
        ({"gamma": 3}, {}),
        ({"gamma": 3, "verifier": "token"}, {"drafts": "model"}),
    ],
    ids=["plain", "drafted", "inside"],
)
async def test_texts_that_are_given_back_are_the_same_texts(
    speculation: dict[str, Any],
    target: dict[str, Any],
    random_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(random_pair[0]))
    small = {"cache_tokens": 200, "overcommit": 4} | target
    async with small_caches(random_pair, small, {}) as stub:
        how = [(stub, number, speculation) for number in range(TEXTS)]
        alone = [await text(*one, seed=one[1]) for one in how]
        together = await asyncio.gather(*(text(*one, seed=one[1]) for one in how))
    assert not sum(reply.summary.given_back for reply in alone)
    given_back = [reply.summary.given_back for reply in together]
    assert sum(given_back) > 2
    assert max(given_back) <= 3
    assert [list(one.token_ids) for one in together] == [list(one.token_ids) for one in alone]
    assert [one.summary.rounds for one in together] == [one.summary.rounds for one in alone]
    assert not any(one.summary.undrafted_rounds for one in together)


async def test_greedy_block_has_all_of_its_room_from_the_start(
    random_pair: tuple[Path, Path],
) -> None:
    async with small_caches(random_pair, {"cache_tokens": 200, "overcommit": 4}, {}) as stub:
        replies = await asyncio.gather(
            *(
                text(stub, n, {"gamma": 3, "verifier": "greedy_block" if n % 2 else "block"})
                for n in range(TEXTS)
            )
        )
    assert not any(reply.summary.given_back for reply in replies[1::2])
    assert all(len(reply.token_ids) == TOKENS for reply in replies)


async def test_a_drafter_gives_back_texts_that_can_do_without(
    random_pair: tuple[Path, Path],
) -> None:
    # A text that needs its drafter is refused where it has no room in time: here there is time.
    small = {"cache_tokens": 200, "overcommit": 4, "admission_seconds": HANG_SECONDS}
    async with small_caches(random_pair, {}, small) as stub:
        seeded = [text(stub, n, {"gamma": 3}, seed=n) for n in range(3)]
        kept = [text(stub, 3, {"verifier": "greedy_block"})]
        free = [text(stub, n, {"gamma": 3}) for n in range(5)]
        replies = await asyncio.gather(*seeded, *kept, *free)
    assert all(len(reply.token_ids) == TOKENS for reply in replies)
    assert not any(reply.summary.given_back for reply in replies), "the target had room"
    assert not any(reply.summary.undrafted_rounds for reply in replies[:4])
    assert any(reply.summary.undrafted_rounds for reply in replies[4:])


def give_back(target: FakeTarget, rounds: list[int | None]) -> None:
    """The target gives texts back before these rounds, once for each that is named."""

    async def interfere(round_: int | None, context: FakeContext) -> None:
        if round_ in rounds:
            rounds.remove(round_)
            await context.give_back()

    target.interfere = interfere


async def test_the_round_that_was_given_back_is_decided_with_its_draft() -> None:
    drafter, target = FakeDrafter(), FakeTarget(overcommit=4)
    give_back(target, [None, 2, 2, 3, 3])
    async with orchestrate(drafter, target, retry_share=0) as stub:
        reply = await stub.Complete(request(sampling={"seed": 1}))
    assert list(reply.token_ids) == target.text(20)
    assert drafter.opened == 1
    assert reply.summary.given_back == 5
    assert not reply.summary.undrafted_rounds
    told = [(o.resumes, o.first_round, o.goes_first) for o in target.openings]
    assert told == [
        *[(False, 0, False)],
        *[(True, 1, False), (True, 1, True)],
        *[(True, 2, True), (True, 2, True)],
    ]
    emitted = [opening.emitted_tokens for opening in target.openings]
    assert emitted == sorted(emitted)
    assert emitted[1] == emitted[2] > 0


async def test_a_text_may_be_given_back_as_often_as_it_takes() -> None:
    """No budget of moves is touched, and no target left."""
    drafter, target = FakeDrafter(), FakeTarget(overcommit=4)
    give_back(target, [2] * 30)
    async with orchestrate(drafter, target, retry_share=0) as stub:
        reply = await stub.Complete(request(sampling={"seed": 1}))
    assert list(reply.token_ids) == target.text(20)
    assert reply.summary.given_back == 30


async def test_rounds_that_were_asked_for_ahead_are_asked_for_again() -> None:
    drafter, target = FakeDrafter(), FakeTarget(overcommit=4)
    give_back(target, [5, 11])
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request(speculation=pb.Speculation(gamma=0)))
    assert list(reply.token_ids) == target.text(20)
    assert reply.summary.given_back == 2
    assert [(o.resumes, o.first_round) for o in target.openings[1:]] == [(True, 4), (True, 10)]
    assert reply.summary.rounds == 20


async def test_a_target_of_an_earlier_release_draws_a_token_in_place_of_the_round() -> None:
    """It does not know how to resume; the round's number was not used."""
    drafter, first, second = FakeDrafter(), FakeTarget(overcommit=4), FakeTarget()

    async def interfere(round_: int | None, context: FakeContext) -> None:
        if round_ == 3:
            await context.give_back()
        if round_ is None and len(first.openings) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    first.interfere = interfere
    async with orchestrate(drafter, first, second) as stub:
        while not first.openings:  # a text may begin at the other one
            reply = await stub.Complete(request())
            assert list(reply.token_ids) == first.text(20)
    last = second.openings[-1]
    assert (last.resumes, last.first_round) == (False, 3)
    assert reply.summary.given_back == 1


async def test_a_text_waits_for_room_as_long_as_its_caller() -> None:
    drafter, target = FakeDrafter(), FakeTarget(overcommit=4)
    full = True

    async def interfere(round_: int | None, context: FakeContext) -> None:
        if round_ == 2 and len(target.openings) == 1:
            await context.give_back()
        if round_ is None and full and target.openings:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the KV cache is full")

    target.interfere = interfere
    async with orchestrate(drafter, target, retry_share=0) as stub:
        call = asyncio.ensure_future(stub.Complete(request()))
        await until(lambda: target.opened >= 8)
        full = False
        reply = await call
        assert list(reply.token_ids) == target.text(20)
        assert reply.summary.given_back == 1
        full = True
        target.openings[1:] = []
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Complete(request(), timeout=0.2)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_drafter_without_a_cache_promises_nothing() -> None:
    async with AsyncExitStack() as stack:
        own = DrafterSettings(method="lookup", overcommit=4)
        server = await start(stack, make_drafter(own))
        await server.ready()
        channel = await connect(stack, address_of(server))
        stub: Any = drafter_pb2_grpc.DrafterServiceStub(channel)
        reply = await stub.GetModelInfo(drafter_pb2.GetModelInfoRequest())
    assert reply.info.overcommit == 4
    stats = reply.stats
    assert (stats.promised_tokens, stats.held_tokens, stats.longest_tokens) == (0, 0, 0)


async def test_a_request_that_is_too_large_waits_for_no_room() -> None:
    drafter, target = FakeDrafter(), FakeTarget(overcommit=4, max_message_bytes=1000)
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request(prompt_token_ids=[50] * 900), timeout=HANG_SECONDS)
    assert refused.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED
