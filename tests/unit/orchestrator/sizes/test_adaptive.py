"""Adaptive draft sizes in simulated worlds whose best size is known. Time is simulated too."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from orchestrator.sizes.acceptance import AcceptanceEstimate, Share
from orchestrator.sizes.adaptive import AdaptiveSize
from orchestrator.sizes.goodput import PLAIN, expected_tokens, sizes
from orchestrator.sizes.shared import Adaptation
from orchestrator.sizes.trials import RoundMix
from orchestrator.text.contracts import Decided, Drafted, DraftSize
from tandem.telemetry.stages import StageTimes
from tests.support.simulated_services import MS, SimulatedServices

# What a trial now and then and the noise of times may cost, of the best fixed size.
NEARLY = 0.9
WORLDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "cheap drafts": {"draft_ms": 0.25},
    "dear drafts": {"draft_ms": 3.0},
    "a good drafter": {"acceptance": 0.9},
    "a middling one": {"acceptance": 0.4, "draft_ms": 2.0},
    "a bad one": {"acceptance": 0.05},
    # Who drafts has others wait: texts that are fastest without, all of them together.
    "a crowd": {"draft_ms": 1.2, "verify_ms": 2.5, "hop_ms": 0.4, "crowd": 0.15},
}


@pytest.mark.parametrize("texts", [1, 8])
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_nearly_as_fast_as_the_best_size_and_never_slower_than_none(
    world: str, texts: int
) -> None:
    made = SimulatedServices(seed=1, **WORLDS[world])
    made.run(150 * texts, texts, length=80)
    speed = made.run(300 * texts, texts, length=80)
    assert speed >= NEARLY * made.best(texts)
    assert speed >= 0.95 * made.speed(PLAIN, texts)


def test_it_drafts_less_the_more_a_row_costs() -> None:
    """At 32 texts a target that computes fill its rows drafts little, for one text more."""
    busy = SimulatedServices(row_ms=0.5)
    busy.run(120 * 32, 32, length=80)
    before = len(busy.chosen)
    speed = busy.run(100 * 32, 32, length=80)
    assert speed >= 0.85 * busy.best(32)
    assert Counter(busy.chosen[before:]).most_common(1)[0][0].gamma <= 2
    busy.run(50, 1)
    assert Counter(busy.chosen[-20:]).most_common(1)[0][0].gamma >= 3


@pytest.mark.parametrize("texts", [1, 8])
def test_a_drafter_that_turns_bad_is_left_within_twenty_rounds_and_found_again(texts: int) -> None:
    world = SimulatedServices(seed=2)
    world.run(200 * texts, texts, length=80)
    world.acceptance = 0.02
    world.run(20 * texts, texts, length=80)
    assert world.run(150 * texts, texts, length=80) >= 0.95 * world.speed(PLAIN, texts)
    world.acceptance = 0.74
    world.run(150 * texts, texts, length=80)
    assert world.run(200 * texts, texts, length=80) >= 0.9 * world.best(texts)


def test_it_keeps_to_a_size_that_is_as_good_as_any() -> None:
    world = SimulatedServices(seed=3, noise=0.05)
    world.run(300)
    before = len(world.chosen)
    world.run(300)
    later = [size.gamma for size in world.chosen[before:]]
    changes = sum(one != other for one, other in pairwise(later))
    assert changes <= 30  # and those are trials, there and back


def test_what_there_is_to_choose_from() -> None:
    assert [size.gamma for size in sizes(8, 0, None, None)] == [0, 1, 2, 3, 4, 6, 8]
    assert sizes(8, 0, 5, None) == (DraftSize(5),)
    assert sizes(8, 16, 0, None) == (PLAIN,)
    assert sizes(8, 16, 4, None) == (DraftSize(4, 4), DraftSize(4, 8), DraftSize(4, 16))
    assert sizes(8, 16, 4, 7) == (DraftSize(4, 7),)
    assert all(size.nodes == 6 for size in sizes(8, 16, None, 6)[1:])
    assert max(size.gamma for size in sizes(8, 16, None, 6)) == 6
    assert max(size.nodes for size in sizes(16, 16, None, None)) == 16
    assert sizes(0, 0, None, None) == (PLAIN,)
    assert sizes(8, 4, 8, None) == (DraftSize(8, 4),)


def test_expected_tokens_of_chains_and_trees() -> None:
    seen = AcceptanceEstimate()
    chances = seen.chances(4)
    first, (second, *_) = chances.first[0], chances.later
    assert expected_tokens(DraftSize(2), chances) == pytest.approx(1 + first + first**2)
    # The two likeliest nodes at depth one are siblings.
    assert expected_tokens(DraftSize(1, 2), chances) == pytest.approx(1 + first + second)
    assert expected_tokens(PLAIN, chances) == 1


def drafted(parents: list[int] | None, count: int) -> Drafted:
    return Drafted([0] * count, parents, None, 0, StageTimes())


def test_acceptance_is_learnt_by_depth_and_rank() -> None:
    shared = AcceptanceEstimate()
    own = AcceptanceEstimate(shared)
    # Of two at the root the second is kept, and behind it nothing.
    tree = drafted([0, 0, 2, 2], 4)
    for _ in range(60):
        own.observe(tree, Decided(2, 1, 0, [0.2, 0.5, 0.1, 0.1]))
    for chances in (own.chances(3), shared.chances(3)):
        assert chances.first[0] == pytest.approx(0.2, abs=0.05)
        assert chances.first[1] == pytest.approx(0.1, abs=0.05)
        assert chances.later[0] == pytest.approx(0.5, abs=0.15)
        assert chances.first[2] == pytest.approx(chances.first[1], abs=0.02)  # never seen
    assert AcceptanceEstimate(shared).chances(1).first == pytest.approx(shared.chances(1).first)


def test_a_share_notices_a_change_and_not_the_noise() -> None:
    share = Share(0.7)
    for at in range(200):
        share.add(0.7 + (0.2 if at % 2 else -0.2))
    assert share.value == pytest.approx(0.7, abs=0.05)
    for _ in range(10):
        share.add(0.0)
    assert share.value < 0.25


def test_rounds_are_among_their_kind_or_not() -> None:
    now = 0
    mix = RoundMix(lambda: now)

    def tick() -> int:
        nonlocal now
        now += 1
        return now

    began = tick()
    for _ in range(8):
        mix.enter(True)
    tick()
    assert mix.leave(True, began)
    began_beside = tick()
    mix.enter(False)  # a plain one among seven
    tick()
    assert mix.leave(True, began)  # is too few to matter to them
    assert not mix.leave(False, began_beside)  # but they to it
    for _ in range(3):
        mix.leave(True, began)
    tick()
    mix.enter(False)  # among three
    tick()
    assert not mix.leave(True, began)
    mix.leave(True, began)
    mix.leave(True, began)
    began_alone = tick()
    mix.enter(False)
    tick()
    assert mix.leave(False, began_alone)


def test_a_text_that_fails_in_a_round_is_no_company() -> None:
    everyone = Adaptation(lambda: 8, lambda: 7)
    text = AdaptiveSize(everyone, sizes(8, 0, 4, None))
    assert text.choose(100).size == DraftSize(4)
    text.end()
    text.end()  # also behind its last round
    everyone.mix.enter(False)
    assert everyone.mix.leave(False, 0)


@pytest.mark.parametrize("texts", [1, 8])
def test_no_text_drafts_for_itself_alone(texts: int) -> None:
    """Its drafts would all be taken, and would slow the others by more than it gains."""
    active, now = 1, 0
    everyone, long = Adaptation(lambda: active, lambda: now), DraftSize(8)
    policies = [AdaptiveSize(everyone, sizes(8, 0, None, None)) for _ in range(2)]
    own, other = policies
    model = StageTimes(forward_ns=MS)
    for policy, overlap, rounds in ((other, 0.5, 60), (own, 0.98, 30), (other, 0.5, 60)):
        for _ in range(rounds):
            gamma = policy.choose(100).size.gamma
            now += 20 * MS
            kept = round(sum(overlap**depth for depth in range(1, gamma + 1)))
            verdict = Decided(kept, kept, 0, [overlap] * gamma, model)
            drafted = Drafted([0] * gamma, None, None, 0, model) if gamma else None
            policy.observe(drafted, verdict)
    active = texts
    for load in (0, 3):
        for _ in range(40):
            everyone.times.add(load, PLAIN, 4 * MS, None, model)
            everyone.times.add(load, long, 16 * MS, model, model, home=False)
    for policy in policies:
        policy.choose(100)
    assert (own.choose(100).size == PLAIN) == (texts == 8)


@pytest.mark.parametrize(("asked", "known"), [(4, True), (2, False)])
def test_a_round_that_was_asked_for_before_teaches_no_time(asked: int, known: bool) -> None:
    """A target that drafts itself is asked ahead: what it plays may have an earlier size."""
    now = 0
    everyone = Adaptation(lambda: 1, lambda: now)
    text = AdaptiveSize(everyone, sizes(8, 0, 4, None))
    model = StageTimes(forward_ns=MS)
    for _ in range(3):
        choice = text.choose(100)
        assert choice.size == DraftSize(4)
        assert choice.rounds > 1
        now += 5 * MS
        drafted = Drafted([0] * asked, None, None, 0, model, asked=DraftSize(asked))
        text.observe(drafted, Decided(1, 1, 0, [0.5] * asked, model))
    assert (everyone.times.at(0) is not None) == known
    assert everyone.acceptance.chances(4).first[0] != AcceptanceEstimate().chances(4).first[0]
