"""The orchestrator's metrics of texts: rounds, tokens, times, losses."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, generation, request
from tests.support.wire.interference import at_round, stand_still
from tests.support.wire.scrape import metered, tracing

DRAFTS = "tandem_spec_decode_num_drafts_total"
DRAFT_TOKENS = "tandem_spec_decode_num_draft_tokens_total"
ACCEPTED = "tandem_spec_decode_num_accepted_tokens_total"
PER_POSITION = "tandem_spec_decode_num_accepted_tokens_per_pos_total"
WASTED = "tandem_spec_decode_wasted_tokens_total"
EMITTED = "tandem_tokens_emitted_total"


async def test_replicas_that_texts_may_go_to_are_told() -> None:
    misfit = FakeTarget(fingerprint="another")
    async with metered(FakeDrafter(), FakeTarget(), FakeTarget(), misfit) as service:
        scraped = await service.scrape()
        for role, count in (("target", 2), ("drafter", 1)):
            assert scraped.value("tandem_replicas", role=role) == count


async def test_rounds_and_tokens_are_those_of_the_summaries() -> None:
    origins: Counter[int] = Counter()
    summaries = []
    async with metered(FakeDrafter(), FakeTarget()) as service:
        for gamma in (0, 3, 4):
            message = generation(speculation={"gamma": gamma}, prompt_token_ids=[1, 2])
            call = service.stub.Generate(pb.GenerateRequest(generation=message))
            events = [event async for event in call]
            summaries.append(events[-1].summary)
            # The first round is the prefill's.
            origins.update(token.origin for event in events[1:-1] for token in event.round.tokens)
        scraped = await service.scrape()
    drafted = sum(summary.drafted_tokens for summary in summaries)
    accepted = sum(summary.accepted_tokens for summary in summaries)
    assert 0 < accepted < drafted
    assert scraped.value("tandem_rounds_total") == sum(s.rounds - 1 for s in summaries)
    gammas = [gamma for summary in summaries for gamma in summary.gammas]
    assert scraped.value(DRAFTS) == sum(gamma > 0 for gamma in gammas)
    assert scraped.value(DRAFT_TOKENS) == drafted
    assert scraped.value(ACCEPTED) == accepted
    for place in range(4):
        kept = [list(s.accepted_per_position)[place : place + 1] for s in summaries]
        assert scraped.value(PER_POSITION, position=str(place)) == sum(map(sum, kept)) > 0
    assert scraped.value(PER_POSITION) == accepted
    assert {name: scraped.value(EMITTED, origin=name) for name in ("accepted", "correction")} == {
        "accepted": origins[pb.TOKEN_ORIGIN_ACCEPTED],
        "correction": origins[pb.TOKEN_ORIGIN_CORRECTION],
    }
    assert scraped.value(EMITTED, origin="bonus") == origins[pb.TOKEN_ORIGIN_BONUS] > 0
    assert scraped.value(EMITTED, origin="prefill") == 3
    assert scraped.value(EMITTED) == sum(summary.new_tokens for summary in summaries)
    assert scraped.value("tandem_tokens_prompt_total") == 6
    assert scraped.value(WASTED) == 0


async def test_times_are_those_of_the_summary() -> None:
    async with metered(FakeDrafter(), FakeTarget()) as service:
        summary = (await service.stub.Complete(request())).summary
        scraped = await service.scrape()
    first = scraped.value("gen_ai_server_time_to_first_token_seconds_sum")
    assert first == pytest.approx(summary.stages.time_to_first_token_ns / 1e9)
    whole = scraped.value("gen_ai_server_request_duration_seconds_sum")
    assert whole >= summary.stages.total_ns / 1e9
    each = scraped.value("gen_ai_server_time_per_output_token_seconds_sum")
    assert each == pytest.approx((whole - first) / 19)
    stages = scraped.named("tandem_stage_duration_seconds_sum", role="orchestrator", step="text")
    assert {"open_wait", "draft_wait", "verify_wait"} < {s.labels["stage"] for s in stages}
    assert sum(sample.value for sample in stages) == pytest.approx(whole)
    (draft_wait,) = (s.value for s in stages if s.labels["stage"] == "draft_wait")
    assert draft_wait == pytest.approx(summary.stages.draft_wait_ns / 1e9)


async def test_a_lost_drafter_is_counted_when_it_is_lost() -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    async def lose(round_: int | None, context: FakeContext) -> None:
        if round_ == 2:
            await context.abort(grpc.StatusCode.INTERNAL, "out of memory")

    drafter.interfere = lose
    at_round(target, 3, stand_still)
    async with metered(drafter, target) as service:
        call = service.stub.Generate(pb.GenerateRequest(generation=generation()))
        for _ in range(3):
            await call.read()
        assert (await service.scrape()).value("tandem_drafters_lost_total") == 1
        call.cancel()


async def test_a_draft_whose_round_is_redone_is_wasted() -> None:
    targets = FakeTarget(), FakeTarget()
    lost: list[FakeContext] = []

    async def lose(context: FakeContext) -> None:
        if not lost:
            lost.append(context)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    for target in targets:
        at_round(target, 2, lose)
    async with metered(FakeDrafter(), *targets) as service:
        reply = await service.stub.Complete(request())
        scraped = await service.scrape()
    assert scraped.value(WASTED, reason="undecided") == 4
    assert scraped.value(DRAFT_TOKENS) == reply.summary.drafted_tokens
    # The next target's prefill gave a token, as the first one's did.
    assert scraped.value(EMITTED, origin="prefill") == 2
    assert scraped.value(EMITTED) == 20


async def test_drafted_tokens_behind_the_end_of_a_text_are_wasted() -> None:
    async with metered(FakeDrafter(), FakeTarget(eos_token_ids=[3])) as service:
        reply = await service.stub.Complete(request())
        assert list(reply.token_ids) == [2, 3]
        scraped = await service.scrape()
    assert scraped.value(WASTED, reason="behind_end") == 3
    assert scraped.value(ACCEPTED) == 4
    assert {s.labels["origin"]: s.value for s in scraped.named(EMITTED)} == {
        "prefill": 1,
        "accepted": 1,
        "correction": 0,
        "bonus": 0,
    }


async def test_a_draft_in_flight_when_its_client_leaves_is_wasted() -> None:
    target, asked = FakeTarget(), asyncio.Event()

    async def note(context: FakeContext) -> None:
        asked.set()
        await stand_still(context)

    at_round(target, 1, note)
    async with metered(FakeDrafter(), target) as service:
        call = service.stub.Generate(pb.GenerateRequest(generation=generation()))
        await call.read()
        await asked.wait()
        call.cancel()
        await service.ends(1)
        scraped = await service.scrape()
    assert scraped.value(WASTED, reason="undecided") == 4
    assert scraped.value(DRAFTS) == 0


@pytest.mark.parametrize(("flags", "found"), [("01", True), ("00", False)])
async def test_an_exemplar_leads_to_the_trace(flags: str, found: bool) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-{flags}"),)
    with tracing():
        async with metered(FakeDrafter(), FakeTarget()) as service:
            await service.stub.Complete(request(), metadata=metadata)
            scraped = await service.scrape()
    exemplars = [s.exemplar for s in scraped.samples if s.exemplar is not None]
    assert {e.labels["trace_id"] for e in exemplars} == ({trace_id} if found else set())
    named = {s.name for s in scraped.samples if s.exemplar is not None}
    first = "gen_ai_server_time_to_first_token_seconds_bucket"
    assert (first in named) is found
