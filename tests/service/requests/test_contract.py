"""Peers that fail or break the protocol: what becomes of the text, and which error is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.target.v1 import target_pb2
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

Code = grpc.StatusCode
INTERNAL = "10.0.0.7:50052 says open.token_ids is bad"

# What a client gets when a target ends the stream with each status.
SHOWN = {
    Code.INVALID_ARGUMENT: Code.INTERNAL,
    Code.FAILED_PRECONDITION: Code.INTERNAL,
    Code.NOT_FOUND: Code.INTERNAL,
    Code.UNIMPLEMENTED: Code.INTERNAL,
    Code.INTERNAL: Code.INTERNAL,
    Code.UNKNOWN: Code.INTERNAL,
    Code.ABORTED: Code.UNAVAILABLE,
    Code.CANCELLED: Code.UNAVAILABLE,
    Code.UNAVAILABLE: Code.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
}


def end_with(code: grpc.StatusCode, at: int | None) -> Any:
    async def interfere(round_: int | None, context: Any) -> None:
        if round_ == at:
            await context.abort(code, INTERNAL)

    return interfere


@pytest.mark.parametrize(
    ("code", "at"),
    # A sequence that was ended for its silence is opened again: test_failover.py.
    [(code, at) for code in SHOWN for at in (None, 2) if (code, at) != (Code.ABORTED, 2)],
)
async def test_a_targets_status_is_translated(code: grpc.StatusCode, at: int | None) -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    target.interfere = end_with(code, at)
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stub.Complete(request())
    assert ended.value.code() == SHOWN[code]
    details = str(ended.value.details())
    assert details.startswith("the target ")
    assert "10.0.0.7" not in details
    assert "token_ids" not in details
    assert (drafter.ended, target.ended) == (drafter.opened, target.opened)


@pytest.mark.parametrize("at", [None, 2])
@pytest.mark.parametrize("code", SHOWN)
async def test_a_drafters_status_only_loses_the_drafter(
    code: grpc.StatusCode, at: int | None
) -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    drafter.interfere = end_with(code, at)
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
    assert reply.summary.drafter_lost
    assert list(reply.token_ids) == target.text(20)


async def test_the_log_has_what_the_client_is_spared() -> None:
    target = FakeTarget()
    target.interfere = end_with(Code.INVALID_ARGUMENT, 2)
    with capture_logs() as logs:
        async with orchestrate(FakeDrafter(), target) as stub:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Complete(request())
    (entry,) = [entry for entry in logs if entry["event"] == "a peer failed"]
    assert f"INVALID_ARGUMENT: {INTERNAL}" in entry["notes"]
    assert entry["notes"].startswith("target 127.0.0.1:")


def on(kind: str, change: Callable[[Any], None]) -> Any:
    """Change the answers of a kind."""

    def alter(reply: Any) -> None:
        if reply.WhichOneof("result") == kind:
            change(getattr(reply, kind))

    return alter


def add(field: str, amount: int) -> Callable[[Any], None]:
    return lambda answer: setattr(answer, field, getattr(answer, field) + amount)


def take(stage: str) -> Callable[[Any], None]:
    """Say that a stage took as long as can be written."""
    return lambda answer: setattr(answer.times, f"{stage}_ns", 2**64 - 1)


def accept_more(verdict: target_pb2.Verdict) -> None:
    verdict.num_accepted += 5
    verdict.position += 5


TARGET_BREACHES: dict[str, tuple[Any, str]] = {
    "round": (on("verdict", add("round", 1)), "verdict.round must be 1, got 2"),
    "position": (on("verdict", add("position", -1)), "verdict.position must be"),
    "accepted": (on("verdict", accept_more), "verdict.num_accepted must be 4, got 9"),
    "token": (on("verdict", add("next_token_id", 100)), "verdict.next_token_id must be 0..99"),
    "overlaps": (on("verdict", lambda v: v.overlaps.append(1.0)), "verdict.overlaps"),
    "chance": (
        on("verdict", lambda v: v.overlaps.__setitem__(0, math.nan)),
        "verdict.overlaps must be 0..1 each",
    ),
    "chances": (
        on("verdict", lambda v: v.overlaps.__setitem__(0, -1e30)),
        "verdict.overlaps must be 0..1 each",
    ),
    "time": (on("verdict", take("forward")), "the longest of times must be 0..86400000000000"),
    "prefill": (on("opened", take("gather")), "the longest of times must be 0..86400000000000"),
    "first": (on("opened", add("token_id", 100)), "opened.token_id must be 0..99"),
    "none": (on("opened", lambda o: o.ClearField("token_id")), "opened.token_id must be set"),
    "kind": (
        lambda reply: reply.CopyFrom(target_pb2.SequenceResponse(verdict=target_pb2.Verdict())),
        "result must be opened, got verdict",
    ),
    "empty": (lambda reply: reply.Clear(), "result must be opened, got None"),
}


@pytest.mark.parametrize("breach", TARGET_BREACHES)
async def test_a_target_that_breaks_the_contract_fails_the_text(breach: str) -> None:
    alter, sentence = TARGET_BREACHES[breach]
    drafter, target = FakeDrafter(), FakeTarget()
    target.alter = alter
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stub.Complete(request())
    assert ended.value.code() == Code.INTERNAL
    assert f"the target broke the contract: {sentence}" in str(ended.value.details()).replace(
        "len(", ""
    )
    assert (drafter.ended, target.ended) == (drafter.opened, 1)


def on_draft(change: Callable[[common_pb2.Draft], None]) -> Any:
    return on("drafted", lambda drafted: change(drafted.draft))


def lengthen(draft: common_pb2.Draft) -> None:
    draft.token_ids.append(1)


def shorten(draft: common_pb2.Draft) -> None:
    del draft.token_ids[-1]


def give_row(draft: common_pb2.Draft) -> None:
    draft.rows.sizes.extend([2] + [0] * (len(draft.token_ids) - 1))
    draft.rows.ids = bytes(8)
    draft.rows.weights = bytes(3)


def grow(draft: common_pb2.Draft) -> None:
    draft.rows.sizes.extend([200_000] + [0] * (len(draft.token_ids) - 1))
    draft.rows.ids = bytes(800_000)
    draft.rows.weights = bytes(400_000)


DRAFTER_BREACHES: dict[str, Any] = {
    "round": on("drafted", add("round", 1)),
    "position": on("drafted", add("position", 1)),
    "long draft": on_draft(lengthen),
    "token": on_draft(lambda draft: draft.token_ids.__setitem__(0, 100)),
    "sizes": on_draft(lambda draft: draft.rows.sizes.append(0)),
    "rows of certain tokens": on_draft(lambda draft: setattr(draft.rows, "ids", bytes(4))),
    "weights": on_draft(give_row),
    "tree": on_draft(lambda draft: draft.parents.append(0)),
    "siblings": on_draft(lambda draft: draft.parents.extend([0] * len(draft.token_ids))),
    "more than the target takes": on_draft(grow),
    "time": on("drafted", take("queue")),
    "prefill": on("opened", take("forward")),
    "version": on("opened", lambda opened: setattr(opened, "weights_version", 2**63)),
    "shared rows": on_draft(lambda draft: draft.row_of.append(0)),
    "kind": lambda reply: reply.CopyFrom(
        drafter_pb2.SequenceResponse(drafted=drafter_pb2.DraftedStep())
    ),
    "nothing": lambda reply: reply.Clear(),
}


@pytest.mark.parametrize("breach", DRAFTER_BREACHES)
async def test_a_drafter_that_breaks_the_contract_is_lost(breach: str) -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    drafter.alter = DRAFTER_BREACHES[breach]
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
    assert reply.summary.drafter_lost
    assert set(reply.summary.gammas) == {0}
    assert list(reply.token_ids) == target.text(20)
    assert drafter.ended == drafter.opened
    assert target.ended == 1


async def test_a_drafter_may_spell_its_chain_out() -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    def spell_out(draft: common_pb2.Draft) -> None:
        draft.parents.extend(range(len(draft.token_ids)))
        draft.row_of.extend(range(len(draft.token_ids)))

    drafter.alter = on_draft(spell_out)
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
    assert not reply.summary.drafter_lost
    assert list(reply.token_ids) == target.text(20)


async def test_a_drafter_may_have_nothing_to_draft() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    drafter.alter = on_draft(lambda draft: draft.Clear())
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
    assert not reply.summary.drafter_lost
    assert set(reply.summary.gammas) == {0}
    assert list(reply.token_ids) == target.text(20)


async def test_a_short_draft_is_fine_but_for_a_rule_of_fixed_gamma() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    drafter.alter = on_draft(shorten)
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
        assert not reply.summary.drafter_lost
        assert max(reply.summary.gammas) == 3
        assert list(reply.token_ids) == target.text(20)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stub.Complete(request(speculation={"verifier": "greedy_block", "gamma": 4}))
        # The drafter is not lost: others' texts keep it.
        reply = await stub.Complete(request())
        assert not reply.summary.drafter_lost
    assert ended.value.code() == Code.INTERNAL
    assert "the drafter drafted 3 of 4 tokens" in str(ended.value.details())
    assert drafter.ended == drafter.opened
