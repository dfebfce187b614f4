"""Draft sizes left to the orchestrator: chosen round by round, reported in each, without harm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from orchestrator.sizes import policies
from orchestrator.sizes.adaptive import Adaptation
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.peers.text.contracts import DraftReply, SizeChoice, VerdictReply
from tandem.speculation.tree import DraftSize
from tests.support.wire.fakes import FakeDrafter, FakeTarget, generation, orchestrate

MS = 1_000_000


class Clock:
    """What rounds take, by a clock that the services move on."""

    def __init__(self) -> None:
        self._now_ns = 0

    def __call__(self) -> int:
        return self._now_ns

    def taking(self, nanoseconds: int) -> Callable[[int | None, Any], Any]:
        """For a fake service: each of its rounds takes so long."""

        async def move(round_: int | None, context: Any) -> None:
            self._now_ns += nanoseconds * (round_ is not None)

        return move


def honest(reply: Any) -> None:
    """Overlaps that fit what was accepted."""
    if reply.HasField("verdict"):
        verdict = reply.verdict
        verdict.overlaps[:] = [
            float(at < verdict.num_accepted) for at in range(len(verdict.overlaps))
        ]


def wrong(reply: Any) -> None:
    """Drafts that are never right."""
    if reply.HasField("drafted"):
        tokens = reply.drafted.draft.token_ids
        tokens[:] = [99] * len(tokens)


async def rounds_of(stub: Any, count: int, **speculation: Any) -> tuple[list[pb.Round], pb.Summary]:
    message = generation(
        stopping={"max_new_tokens": count, "ignore_eos": True}, speculation=speculation
    )
    events = [event async for event in stub.Generate(pb.GenerateRequest(generation=message))]
    return [event.round for event in events[:-1]], events[-1].summary


async def test_a_drafter_that_is_never_right_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(policies, "Adaptation", partial(Adaptation, clock=clock))
    drafter, target = FakeDrafter(), FakeTarget(wraps=60)
    drafter.interfere, target.interfere = clock.taking(4 * MS), clock.taking(2 * MS)
    drafter.alter, target.alter = wrong, honest
    async with orchestrate(drafter, target, gamma="auto") as stub:
        rounds, summary = await rounds_of(stub, 150)
        assert [token.id for round_ in rounds for token in round_.tokens] == target.text(150)
        assert not summary.drafter_lost
        drafted = [round_.gamma for round_ in rounds[1:]]
        assert any(drafted[:30])
        assert drafted[-75:].count(0) >= 50  # a sample is four rounds
        # Texts that begin now begin without drafts, too.
        later, _ = await rounds_of(stub, 12)
        assert [round_.gamma for round_ in later].count(0) >= 6


class Turning:
    """Plain rounds, which may be asked for ahead, then drafts."""

    begins_drafting = False

    def __init__(self, plain: int) -> None:
        self._plain = plain

    def choose(self, left: int) -> SizeChoice:
        self._plain -= 1
        size = DraftSize(0 if self._plain >= 0 else min(3, left - 1))
        return SizeChoice(size, rounds=min(8, left))

    def observe(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        pass

    def end(self) -> None:
        pass


async def test_drafts_follow_plain_rounds_that_were_asked_for_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies.SizePolicies, "policy_for", lambda *_, **__: Turning(20))
    drafter, target = FakeDrafter(), FakeTarget(wraps=60)
    async with orchestrate(drafter, target, gamma="auto") as stub:
        rounds, _ = await rounds_of(stub, 200)
    assert [token.id for round_ in rounds for token in round_.tokens] == target.text(200)
    drafted = [round_.gamma > 0 for round_ in rounds]
    assert not any(drafted[:20])
    # Those that were asked for come first, then those for which the drafter is opened.
    assert sum(drafted) > 20
    assert max(target.runs) > 1


async def test_each_round_says_what_was_expected_of_it() -> None:
    drafter, target = FakeDrafter(), FakeTarget(wraps=10_000)
    target.alter = honest
    async with orchestrate(drafter, target, gamma="auto") as stub:
        rounds, summary = await rounds_of(stub, 90)
    assert summary.new_tokens == 90
    assert any(round_.gamma for round_ in rounds)
    told = [round_ for round_ in rounds if round_.HasField("expected_tokens")]
    assert len(told) >= len(rounds) // 2  # the first ones know nothing yet
    assert all(1 <= round_.expected_tokens <= 9 for round_ in told)
    assert all(round_.expected_wall_ns > 0 for round_ in told)


async def test_what_was_left_open_stays_unset() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(), gamma="auto") as stub:
        _, summary = await rounds_of(stub, 10)
        assert not summary.effective.speculation.HasField("gamma")
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert not info.HasField("default_gamma")
        rounds, summary = await rounds_of(stub, 10, gamma=3)
        assert summary.effective.speculation.gamma == 3
        assert not any(round_.HasField("expected_tokens") for round_ in rounds)
        rounds, _ = await rounds_of(stub, 10, gamma=0)
        assert {round_.gamma for round_ in rounds} == {0}
    async with orchestrate(FakeDrafter(), FakeTarget(), gamma=7) as stub:
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.default_gamma == 7


async def test_a_rule_with_a_fixed_length_has_one() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(), gamma="auto") as stub:
        rounds, summary = await rounds_of(stub, 21, verifier="greedy_block")
    assert summary.effective.speculation.gamma == 4
    assert {round_.gamma for round_ in rounds[1:-1]} == {4}


async def test_without_drafters_texts_are_decoded_plainly() -> None:
    target = FakeTarget()
    async with orchestrate(target, gamma="auto") as stub:
        rounds, summary = await rounds_of(stub, 20)
    assert {round_.gamma for round_ in rounds} == {0}
    assert not summary.drafter_lost
    assert summary.effective.speculation.gamma == 0
