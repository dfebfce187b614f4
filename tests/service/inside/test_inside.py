"""A target that drafts: what it says of itself, what it refuses, and who drafts for a text."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.target.v1 import target_pb2
from tests.service.inside.conftest import Inside
from tests.support.waiting import until
from tests.support.wire.fakes import (
    FakeDrafter,
    FakeTarget,
    generation,
    orchestrate,
)
from tests.support.wire.spans import METADATA, edges, exporter, finished
from tests.support.wire.steps import INVALID, WRONG_STATE, open_verify, status_of, verify_step
from tests.support.wire.talk import Talk

__all__ = ["exporter"]

DRAFTERS = "tandem.drafter.v1.DrafterService"


def run_step(**changes: Any) -> target_pb2.SequenceRequest:
    fields: dict[str, Any] = {"round": 1, "position": 4, "rounds": 5, "gamma": 3}
    return target_pb2.SequenceRequest(run=target_pb2.RunStep(**(fields | changes)))


async def text_of(stub: Any, count: int = 30, **changes: Any) -> tuple[list[int], pb.Summary]:
    message = generation(stopping={"max_new_tokens": count, "ignore_eos": True}, **changes)
    call = stub.Generate(pb.GenerateRequest(generation=message), metadata=METADATA)
    events = [event async for event in call]
    ids = [token.id for event in events[:-1] for token in event.round.tokens]
    return ids, events[-1].summary


@pytest.mark.parametrize(
    ("drafts", "shape", "pure", "nodes"),
    [
        ("model", common_pb2.DRAFT_SHAPE_CHAIN, True, 0),
        ("lookup", common_pb2.DRAFT_SHAPE_CHAIN, False, 0),
        ("tree", common_pb2.DRAFT_SHAPE_TREE, False, 16),
    ],
)
async def test_it_says_what_it_drafts(
    inside: Inside, drafts: str, shape: Any, pure: bool, nodes: int
) -> None:
    stub = await inside.stub(await inside.target(drafts))
    info = await stub.GetModelInfo(target_pb2.GetModelInfoRequest())
    own = info.drafts
    assert (own.drafter, own.shape, own.pure, own.max_nodes) == (drafts, shape, pure, nodes)
    assert json.loads(own.recipe)["method"] == drafts
    assert (own.max_gamma, own.max_length) == (8, info.info.max_length)
    assert own.fingerprint


async def test_a_target_without_drafts_says_so(inside: Inside) -> None:
    stub = await inside.stub(await inside.target(""))
    info = await stub.GetModelInfo(target_pb2.GetModelInfoRequest())
    assert not info.HasField("drafts")


async def test_verdicts_of_a_run_tell_what_was_drafted(inside: Inside) -> None:
    """Drafts of one run may have several sizes; near the end of the text they are cut."""
    stub = await inside.stub(await inside.target())
    talk = Talk(stub.Verify())
    await talk.ask(open_verify(max_new_tokens=12))
    # In one message: a run that ends takes no more rounds.
    await talk.write(
        run_step(rounds=2, gamma=3),
        run_step(round=0, position=0, rounds=1, gamma=0),
        run_step(round=0, position=0, rounds=16, gamma=2),
    )
    verdicts: list[target_pb2.Verdict] = []
    while not (verdicts and verdicts[-1].last):
        message = await talk.call.read()
        verdicts += [answer.verdict for answer in message.responses]
    position = 4
    for place, verdict in enumerate(verdicts):
        left = 3 + 12 - position
        gamma = min((3, 3, 0, *[2] * 16)[place], left - 1)
        assert verdict.HasField("drafted") == (gamma > 0)
        assert len(verdict.drafted.token_ids) == len(verdict.overlaps) == gamma
        assert (verdict.draft_times.forward_ns > 0) == (gamma > 0)
        position += verdict.num_accepted + 1
        assert (verdict.round, verdict.position) == (place + 1, position)
        assert not verdict.drafted.rows.ids
    assert position == 3 + 12
    talk.cancel()


@pytest.mark.parametrize(
    ("drafts", "requests", "code", "sentence"),
    [
        ("", [open_verify(), run_step()], INVALID, "run.gamma must be 0: this target drafts"),
        ("model", [open_verify(), run_step(gamma=9)], INVALID, "run.gamma must be 0..8, got 9"),
        ("model", [open_verify(), run_step(max_nodes=2)], INVALID, "run.max_nodes must be 0..0"),
        ("tree", [open_verify(max_nodes=4), run_step()], INVALID, "run.max_nodes must be 1..4"),
        (
            "tree",
            [open_verify(max_nodes=4), run_step(max_nodes=5)],
            INVALID,
            "run.max_nodes must be 1..4, got 5",
        ),
        (
            "tree",
            [open_verify(verifier="spectr", max_nodes=4), run_step(max_nodes=4)],
            INVALID,
            "spectr does not take the drafts of tree",
        ),
        (
            "lookup",
            [open_verify(verifier="greedy_block", gamma=3), run_step()],
            INVALID,
            "greedy_block does not take the drafts of lookup",
        ),
        (
            "phrases",
            [open_verify(verifier="greedy_block", gamma=3, max_nodes=4), run_step(max_nodes=4)],
            INVALID,
            "greedy_block does not take the drafts of phrases",
        ),
        (
            "model",
            [open_verify(verifier="greedy_block", gamma=3), run_step(gamma=2)],
            INVALID,
            "run.gamma must be 3, got 2",
        ),
        ("model", [open_verify(), run_step(rounds=0)], INVALID, "run.rounds must be 1..32"),
        ("model", [open_verify(), run_step(position=9)], WRONG_STATE, "position 9"),
    ],
)
async def test_what_it_cannot_draft_is_refused(
    inside: Inside, drafts: str, requests: list[Any], code: grpc.StatusCode, sentence: str
) -> None:
    stub = await inside.stub(await inside.target(drafts))
    got, details = await status_of(Talk(stub.Verify()), *requests)
    assert (got, sentence in details) == (code, True), (got, details)
    info = await stub.GetModelInfo(target_pb2.GetModelInfoRequest())
    assert info.stats.open_sequences == 0


async def test_drafts_follow_rounds_that_others_drafted(inside: Inside) -> None:
    """The target's own drafter is told of what came of them; a text at temperature 0 shows it."""
    stub = await inside.stub(await inside.target("lookup"))
    greedy = common_pb2.Sampling(seed=0, temperature=0)
    talk = Talk(stub.Verify())
    opened = (await talk.ask(open_verify(sampling=greedy, max_new_tokens=60))).opened
    tokens = [1, 2, 3, opened.token_id]
    for round_ in range(1, 21):
        step = verify_step(round=round_, position=len(tokens), draft=None)
        tokens.append((await talk.ask(step)).verdict.next_token_id)
    await talk.write(run_step(round=21, position=len(tokens), rounds=1, gamma=1))
    verdict = (await talk.read()).verdict
    ngram = next(n for n in (3, 2, 1) if _earlier(tokens, n) is not None)
    assert list(verdict.drafted.token_ids) == [tokens[_earlier(tokens, ngram) or 0]]
    talk.cancel()


def _earlier(tokens: list[int], length: int) -> int | None:
    """After the latest earlier place of the last tokens."""
    tail = tokens[-length:]
    starts = range(len(tokens) - length - 1, -1, -1)
    return next((i + length for i in starts if tokens[i : i + length] == tail), None)


async def test_without_drafters_targets_draft(inside: Inside) -> None:
    stub = await inside.orchestrator(await inside.target())
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert [json.loads(recipe)["method"] for recipe in info.drafter_recipes] == ["model"]
    _, summary = await text_of(stub)
    assert summary.drafted_tokens > 0
    assert set(summary.gammas[1:-1]) <= {4, 3, 2, 1}
    assert not summary.drafter_lost


async def test_with_drafters_targets_do_not_draft() -> None:
    drafter, target = FakeDrafter(), drafting_fake()
    async with orchestrate(drafter, target) as stub:
        ids, summary = await text_of(stub)
    assert ids == target.text(30)
    assert summary.drafted_tokens > 0
    assert (drafter.opened, target.runs) == (1, [])


async def test_a_text_whose_drafter_is_lost_goes_on_with_its_targets_drafts() -> None:
    drafter, target = FakeDrafter(), drafting_fake()

    async def fail(round_: int | None, context: Any) -> None:
        if round_ is not None and round_ > 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")

    drafter.interfere = fail
    async with orchestrate(drafter, target) as stub:
        ids, summary = await text_of(stub)
    assert ids == target.text(30)
    assert summary.drafter_lost
    assert sum(target.runs) > 0
    assert all(gamma > 0 for gamma in summary.gammas[1:-1])


async def test_a_rule_that_needs_every_draft_has_its_targets_where_no_drafter_is_left() -> None:
    drafter, target = FakeDrafter(), drafting_fake()
    assert target.drafts is not None
    target.drafts.pure = True
    async with orchestrate(drafter, target) as stub:
        await text_of(stub, speculation={"verifier": "greedy_block", "gamma": 3})
        assert (drafter.opened, target.runs) == (1, [])
        await drafter.health.set(DRAFTERS, health_pb2.HealthCheckResponse.NOT_SERVING)

        async def drafted() -> bool:
            """As soon as the orchestrator knows that there is no drafter."""
            try:
                ids, summary = await text_of(
                    stub, speculation={"verifier": "greedy_block", "gamma": 3}
                )
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            assert ids == target.text(30)
            return bool(summary.drafted_tokens and target.runs)

        await until(drafted)


async def test_targets_of_trees_do_not_take_over_from_a_drafter_of_chains() -> None:
    """Such a text announced no nodes: it goes on plainly."""
    drafter, target = FakeDrafter(), drafting_fake()
    drafts = target.drafts
    assert drafts is not None
    drafts.shape, drafts.max_nodes = common_pb2.DRAFT_SHAPE_TREE, 8
    drafter.interfere = _always_lost
    async with orchestrate(drafter, target) as stub:
        ids, summary = await text_of(stub)
    assert ids == target.text(30)
    assert summary.drafted_tokens == 0


async def _always_lost(round_: int | None, context: Any) -> None:
    if round_ is not None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")


async def test_where_no_drafter_ever_came_targets_draft(inside: Inside) -> None:
    stub = await inside.orchestrator(await inside.target(), drafters=("127.0.0.1:1",))
    _, summary = await text_of(stub)
    assert summary.drafted_tokens > 0


@pytest.mark.parametrize("drafts", ["", "lookup"])
async def test_draft_by_target_needs_targets_that_draft(inside: Inside, drafts: str) -> None:
    """One sentence says what is missing."""
    address = await inside.target(drafts)
    stub = await inside.orchestrator(
        address, draft_by="target", ready=bool(drafts), failover_seconds=0.0
    )
    if drafts:
        _, summary = await text_of(stub)
        assert summary.new_tokens == 30
        return

    async def said() -> bool:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text_of(stub)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        return "DRAFT_BY=target, and not every target drafts" in str(caught.value.details())

    await until(said)


async def test_draft_by_drafters_leaves_targets_drafts_unused(inside: Inside) -> None:
    stub = await inside.orchestrator(await inside.target(), draft_by="drafters")
    _, summary = await text_of(stub, speculation={})
    assert summary.drafted_tokens == 0


async def test_a_round_has_its_draft_and_its_verdict_in_the_trace(
    inside: Inside, exporter: InMemorySpanExporter
) -> None:
    stub = await inside.orchestrator(await inside.target())
    _, summary = await text_of(stub)
    found = await finished(exporter)
    counted, rounds = edges(found), summary.rounds - 1
    drafted = sum(gamma > 0 for gamma in summary.gammas)
    assert counted["call.verify", "round"] == counted["verify", "call.verify"] == rounds
    assert counted["draft", "call.verify"] == counted["draft.forward", "draft"] == drafted > 0
    spans = Counter((span.name, (span.attributes or {}).get("tandem.inside")) for span in found)
    assert spans["draft", True] == drafted
    by_round = {
        (span.name, (span.attributes or {})["tandem.round"]): span
        for span in found
        if span.name in ("draft", "verify")
    }
    for number in range(1, drafted + 1):
        draft, verify = by_round["draft", number], by_round["verify", number]
        assert (draft.end_time or 0) <= (verify.start_time or 0)
        assert (draft.attributes or {})["tandem.gamma"] == 4


def drafting_fake() -> FakeTarget:
    fake = FakeTarget(wraps=60)
    fake.drafts = target_pb2.TargetDrafts(
        drafter="model", shape=common_pb2.DRAFT_SHAPE_CHAIN, max_gamma=8, max_length=1024
    )
    return fake


@pytest.mark.parametrize("verifier", ["block", "greedy_block"])
async def test_a_target_that_is_lost_amid_its_drafts_loses_no_token(verifier: str) -> None:
    """Another one goes on after the rounds that the lost one may have decided unseen."""
    targets = drafting_fake(), drafting_fake()
    for fake in targets:
        fake.drafts.pure = True  # type: ignore[union-attr]
    dead: list[FakeTarget] = []

    def die_once(fake: FakeTarget) -> Callable[[int | None, Any], Any]:
        async def die(at: int | None, context: Any) -> None:
            if at == 5 and not dead:
                dead.append(fake)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        return die

    for fake in targets:
        fake.interfere = die_once(fake)
    async with orchestrate(*targets, failover_seconds=60.0, stage_floor_seconds=60.0) as stub:
        ids, summary = await text_of(stub, 100, speculation={"gamma": 4, "verifier": verifier})
    assert dead
    assert ids == targets[0].text(100)
    assert summary.drafted_tokens > 60
    (second,) = (opening for fake in targets for opening in fake.openings if opening.first_round)
    assert second.first_round > 5


async def test_rounds_that_do_not_fit_what_was_asked_end_the_text() -> None:
    target = drafting_fake()

    def longer(reply: Any) -> None:
        if reply.HasField("verdict"):
            reply.verdict.drafted.token_ids.extend([1] * 5)

    target.alter = longer
    async with orchestrate(target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text_of(stub)
    assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_a_client_that_leaves_ends_a_run_of_drafts(inside: Inside) -> None:
    address = await inside.target()
    stub, target = await inside.orchestrator(address), await inside.stub(address)
    for _ in range(8):
        message = generation(stopping={"max_new_tokens": 400, "ignore_eos": True})
        call = stub.Generate(pb.GenerateRequest(generation=message))
        assert await call.read()
        call.cancel()

    async def ended() -> bool:
        info = await target.GetModelInfo(target_pb2.GetModelInfoRequest())
        return bool(info.stats.open_sequences == 0)

    await until(ended)


@pytest.mark.parametrize("gamma", ["auto", 3])
async def test_a_text_that_outgrows_its_targets_drafter_goes_on_without_drafts(
    inside: Inside,
    random_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gamma: int | str,
) -> None:
    """The drafter can hold 30 tokens, and the target more."""
    short = tmp_path / "short"
    shutil.copytree(random_pair[0], short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 30}))
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(short))
    address = await inside.target("model", max_length=90)
    info = await (await inside.stub(address)).GetModelInfo(target_pb2.GetModelInfoRequest())
    assert (info.drafts.held_length, info.drafts.max_length) == (30, 90)
    stub = await inside.orchestrator(address, gamma=gamma)
    greedy: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "sampling": {"temperature": 0}}
    found, summary = await text_of(stub, 80, **greedy)
    plain, _ = await text_of(stub, 80, **greedy, speculation={"gamma": 0})
    assert found == plain
    if gamma == 3:
        assert 0 < summary.drafted_tokens < 27 * 3
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await text_of(stub, 80, speculation={"gamma": 3, "verifier": "greedy_block"})
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the 30 tokens that a sequence may hold beside drafts" in str(refused.value.details())
    whole, summary = await text_of(stub, 20, speculation={"gamma": 3, "verifier": "greedy_block"})
    assert (len(whole), summary.drafted_tokens > 0) == (20, True)
