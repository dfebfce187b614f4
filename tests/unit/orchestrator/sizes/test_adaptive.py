"""Adaptive draft sizes in simulated worlds whose best size is known. Time is simulated too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import geometric_mean

import pytest

from orchestrator.sizes.acceptance import AcceptanceEstimate
from orchestrator.sizes.adaptive import Adaptation, AdaptiveSize
from orchestrator.sizes.goodput import PLAIN, expected_tokens, sizes
from tandem.peers.text.contracts import DraftReply, VerdictReply
from tandem.profile import Profile
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes
from tests.support.rival_sizes import WithProfile, WithSteps
from tests.support.simulated_services import MS, SimulatedServices
from tests.support.simulated_services import WORLDS as ALL_WORLDS

# What samples, the noise of times and sizes that are not offered may cost, of the best fixed size.
NEARLY, NEARLY_PLAIN = 0.94, 0.97
# `python -m tests.sizes` has the others too.
WORLDS = dict(list(ALL_WORLDS.items())[:7])


@pytest.mark.parametrize("texts", [1, 8, 32])
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_nearly_as_fast_as_the_best_size_and_never_slower_than_none(
    world: str, texts: int
) -> None:
    made = SimulatedServices(seed=1, **WORLDS[world])
    made.run(50 * texts, texts, length=80)
    speed = made.run({1: 1500, 8: 1600, 32: 2400}[texts], texts, length=80)
    assert speed >= NEARLY * made.best(texts)
    assert speed >= NEARLY_PLAIN * made.speed(PLAIN, texts)


@pytest.mark.parametrize(("profiled", "texts"), [(0.0, 1), (0.5, 8), (3.0, 1), (0.0, 8)])
def test_a_profile_that_is_wrong_or_missing_is_corrected(profiled: float, texts: int) -> None:
    for world in WORLDS.values():
        made = SimulatedServices(seed=1, profiled=profiled, **world)
        made.run(50 * texts, texts, length=80)
        speed = made.run(150 * max(texts, 4), texts, length=80)
        assert speed >= 0.9 * made.best(texts)


@pytest.mark.parametrize("texts", [1, 16])
def test_on_a_gpu_it_drafts_four_tokens_where_eight_lose(texts: int) -> None:
    """An H100, a target of 8 B and a drafter of 0.5 B (ms): long drafts are slower than none."""
    world = SimulatedServices(
        draft_ms=2.1, verify_ms=7.6, row_ms=0.03, hop_ms=0.4, acceptance=0.66, max_gamma=16
    )
    assert world.speed(DraftSize(4), texts) > 1.05 * world.speed(PLAIN, texts)
    assert world.speed(DraftSize(8), texts) < world.speed(PLAIN, texts)
    world.run(100 * texts, texts, length=80)
    before = len(world.chosen)
    assert world.run(300 * texts, texts, length=80) >= NEARLY * world.best(texts)
    assert 2 <= Counter(world.chosen[before:]).most_common(1)[0][0].gamma <= 4


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
    bad = []
    for seed in range(8 if texts == 1 else 2):
        world = SimulatedServices(seed=seed)
        world.run(200 * texts, texts, length=80)
        world.acceptance = 0.02
        world.run(20 * texts, texts, length=80)
        bad.append(world.run(150 * texts, texts, length=80) / world.speed(PLAIN, texts))
        world.acceptance = 0.74
        world.run(500 * texts, texts, length=80)
        assert world.run(200 * texts, texts, length=80) >= 0.95 * world.best(texts)
    assert sum(bad) / len(bad) >= 0.94


@pytest.mark.parametrize("rows_profiled", [0.5, 2.0])
@pytest.mark.parametrize("texts", [1, 8])
def test_a_profile_that_is_wrong_about_rows_costs_little(rows_profiled: float, texts: int) -> None:
    for acceptance in (0.3, 0.7):
        made = SimulatedServices(
            seed=1, rows_profiled=rows_profiled, acceptance=acceptance, row_ms=0.4
        )
        made.run(100 * texts, texts, length=80)
        speed = made.run(300 * max(texts, 4), texts, length=80)
        assert speed >= 0.9 * made.best(texts)
        assert speed >= 0.94 * made.speed(PLAIN, texts)


@pytest.mark.parametrize("texts", [1, 8])
def test_it_beats_what_other_engines_do(texts: int) -> None:
    """In the mean over all worlds; and in none is it clearly slower."""

    def speeds(kind: type[SimulatedServices]) -> Iterator[float]:
        for world in WORLDS.values():
            made = kind(seed=1, **world)
            made.run(50 * texts, texts, length=80)
            yield made.run(1200, texts, length=80)

    own = list(speeds(SimulatedServices))
    for rival in (WithSteps, WithProfile):
        ratios = [mine / other for mine, other in zip(own, speeds(rival), strict=True)]
        assert min(ratios) > 0.96
        assert geometric_mean(ratios) > 1.01


def test_it_keeps_to_a_size_that_is_as_good_as_any() -> None:
    world = SimulatedServices(seed=3, noise=0.05)
    world.run(300)
    before = len(world.chosen)
    world.run(300)
    later = [size.gamma for size in world.chosen[before:]]
    changes = sum(one != other for one, other in pairwise(later))
    assert changes <= 30  # at most


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


def drafted(parents: list[int] | None, count: int) -> DraftReply:
    return DraftReply([0] * count, parents, None, 0, StageTimes())


def test_acceptance_is_learnt_by_depth_and_rank() -> None:
    shared = AcceptanceEstimate()
    own = AcceptanceEstimate(shared)
    # Of two at the root the second is kept, and after it nothing.
    tree = drafted([0, 0, 2, 2], 4)
    for _ in range(100):
        own.observe(tree, VerdictReply(2, 1, 0, [0.2, 0.5, 0.1, 0.1]))
    for chances in (own.chances(3), shared.chances(3)):
        assert chances.first[0] == pytest.approx(0.2, abs=0.05)
        assert chances.first[1] == pytest.approx(0.12, abs=0.05)
        assert chances.later[0] == pytest.approx(0.5, abs=0.05)
        assert chances.first[2] == pytest.approx(chances.first[1], abs=0.05)  # never seen
    assert AcceptanceEstimate(shared).chances(1).first == pytest.approx(shared.chances(1).first)


def test_a_text_is_told_from_the_others_by_what_it_observed() -> None:
    shared = AcceptanceEstimate()
    own, other = AcceptanceEstimate(shared), AcceptanceEstimate(shared)
    for _ in range(50):
        own.observe(drafted(None, 1), VerdictReply(0, 0, 0, [0.1]))
        other.observe(drafted(None, 1), VerdictReply(1, 1, 0, [0.9]))
    low, high = own.chances(1).first[0], other.chances(1).first[0]
    assert low < 0.35 < shared.chances(1).first[0] < 0.7 < high


def test_what_was_observed_long_ago_is_soon_outweighed() -> None:
    estimate = AcceptanceEstimate()
    for _ in range(100):
        estimate.observe(drafted(None, 1), VerdictReply(0, 0, 0, [0.0]))
    before = estimate.chances(1).first[0]
    estimate.fade()
    assert estimate.chances(1).first[0] == pytest.approx(before, abs=0.15)  # no news
    for _ in range(4):
        estimate.observe(drafted(None, 1), VerdictReply(1, 1, 0, [0.8]))
    assert estimate.chances(1).first[0] > 0.3


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


MODEL = StageTimes(forward_ns=MS)
# A row costs nothing, and a draft's pass a tenth of the target's.
VERIFY, DRAFT = Profile([(1, 1, MS)]), Profile([(1, 1, 0.1 * MS)])


def together(texts: int) -> tuple[Adaptation, list[AdaptiveSize], Clock]:
    clock = Clock()
    everyone = Adaptation(lambda: texts, VERIFY, DRAFT, clock)
    return everyone, [AdaptiveSize(everyone, sizes(8, 0, None, None)) for _ in range(texts)], clock


def step(
    texts: list[AdaptiveSize], clock: Clock, wall: float, overlap: float, drafting: int = 99
) -> list[DraftSize]:
    """A round of all texts, of which the first so many have drafters; what they chose."""
    chosen = [text.choose(1000).size for text in texts]
    clock.now += round(wall * MS)
    for at, (text, size) in enumerate(zip(texts, chosen, strict=True)):
        finish(text, size if at < drafting else PLAIN, overlap)
    return chosen


def finish(text: AdaptiveSize, size: DraftSize, overlap: float) -> float:
    """A round that drafted so much; the tokens that it is expected to emit."""
    expected = sum(overlap**depth for depth in range(size.gamma + 1))
    times = StageTimes(forward_ns=round(0.1 * size.gamma * MS))
    draft = DraftReply([0] * size.gamma, None, None, 0, times) if size.gamma else None
    kept = round(expected) - 1
    text.observe(draft, VerdictReply(kept, kept, 0, [overlap] * size.gamma, MODEL))
    return expected


def test_a_few_unlucky_drafts_are_no_reason_to_stop() -> None:
    _, (text,), clock = together(1)
    for _ in range(4):
        size = text.choose(1000).size
        clock.now += 3 * MS
        draft = DraftReply([0] * size.gamma, None, None, 0, StageTimes(forward_ns=MS // 2))
        text.observe(draft, VerdictReply(0, 0, 0, [0.7] * size.gamma, MODEL))
    for _ in range(12):
        assert text.choose(1000).size.gamma
        finish(text, text.choose(1000).size, 0.7)


def test_drafts_begin_at_once_where_the_profiles_say_that_they_pay() -> None:
    _, texts, _ = together(1)
    assert texts[0].begins_drafting
    assert texts[0].choose(1000).size.gamma >= 4
    slow = Adaptation(lambda: 1, VERIFY, Profile([(1, 1, 2 * MS)]))
    assert not AdaptiveSize(slow, sizes(8, 0, None, None)).begins_drafting


@pytest.mark.parametrize("overlap", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("count", [1, 8])
def test_samples_cost_no_more_than_their_share(count: int, overlap: float) -> None:
    """Texts that are fastest without drafts draft in a few rounds of several hundred."""
    _, texts, clock = together(count)
    tokens = began = 0.0
    for at in range(1500):
        if at == 100:
            tokens, began = 0.0, clock.now
        chosen = [text.choose(1000).size for text in texts]
        drafting = sum(size.gamma > 0 for size in chosen) / count
        clock.now += round((2 + 18 * drafting) * MS)
        for text, size in zip(texts, chosen, strict=True):
            tokens += finish(text, size, overlap)
    assert tokens * 2 * MS / count >= 0.97 * (clock.now - began)


def test_texts_turn_together() -> None:
    """Rounds of both kinds beside each other say nothing of either."""
    _, texts, clock = together(8)
    seen = [8]
    for _ in range(60):
        wall = 30 if seen[-1] else 3
        seen.append(sum(size.gamma > 0 for size in step(texts, clock, wall, 0.1)))
    turned = seen.index(next(count for count in seen if count < 8))
    assert turned < 20
    assert all(count <= 1 for count in seen[turned + 8 :])


def test_texts_whose_drafters_are_being_opened_teach_nothing_of_times() -> None:
    everyone, texts, clock = together(8)
    for _ in range(2):
        assert all(size.gamma for size in step(texts, clock, 2, 0.9))
    before = everyone.times.wall(DraftSize(4), 8), everyone.times.wall(PLAIN, 8)
    for drafting in (0, 2):
        for _ in range(12):
            step(texts, clock, 50, 0.9, drafting=drafting)
    assert (everyone.times.wall(DraftSize(4), 8), everyone.times.wall(PLAIN, 8)) == before
    for _ in range(3):
        step(texts, clock, 50, 0.9)
    assert everyone.times.wall(DraftSize(4), 8) > 2 * before[0]


def test_texts_without_drafters_do_not_keep_the_others_drafting() -> None:
    _, texts, clock = together(8)
    chosen = [DraftSize(4)]
    for at in range(120):
        wall = 1 + 2 * sum(size.gamma > 0 for size in chosen) / 8
        chosen = step(texts, clock, wall, 0.8 if at < 60 else 0.02, drafting=4)
        assert at != 59 or all(size.gamma for size in chosen)
    assert sum(size.gamma > 0 for size in chosen) <= 1


def test_a_drafter_that_does_not_come_is_not_waited_for_for_ever() -> None:
    _, (text,), clock = together(1)
    assert text.begins_drafting
    wanted = [True]
    for _ in range(3000):
        here = len(wanted) < 30
        chosen = step([text], clock, 4 if here and wanted[-1] else 1, 0.02, drafting=int(here))
        wanted.append(chosen[0].gamma > 0)
    assert sum(wanted) < 500


def test_a_text_that_fails_in_a_round_leaves_no_round_behind() -> None:
    everyone, (text, *others), clock = together(8)
    text.choose(100)
    text.end()
    text.end()  # also after its last round
    before = everyone.times.wall(DraftSize(4), 8)
    for _ in range(8):
        step(others, clock, 50, 0.9)
    assert everyone.times.wall(DraftSize(4), 8) != before


@pytest.mark.parametrize("texts", [1, 8])
def test_no_text_drafts_for_itself_alone(texts: int) -> None:
    """Its drafts would all be taken, and would slow the others by more than it gains."""
    active, clock = 1, Clock()
    everyone = Adaptation(lambda: active, VERIFY, DRAFT, clock)
    own, other = (AdaptiveSize(everyone, sizes(8, 0, None, None)) for _ in range(2))
    for policy, overlap, rounds in ((other, 0.3, 60), (own, 0.98, 30), (other, 0.3, 60)):
        for _ in range(rounds):
            step([policy], clock, 2, overlap)
    active = texts
    for size, wall in ((PLAIN, 4), (DraftSize(8), 16)):
        draft = drafted(None, 8) if size.gamma else None
        for _ in range(40):
            everyone.times.add(size, texts, wall * MS, draft, VerdictReply(0, 0, 0, (), MODEL))
    chosen, wall = [PLAIN], 4
    for _ in range(40):
        chosen = step([own], clock, 16 if chosen[0].gamma else 4, 0.98)
    assert (chosen == [PLAIN]) == (texts == 8)


@pytest.mark.parametrize(("asked", "known"), [(4, True), (2, False)])
def test_a_round_that_was_asked_for_before_teaches_no_time(asked: int, known: bool) -> None:
    """A target that drafts itself is asked ahead: what it plays may have an earlier size."""
    clock = Clock()
    everyone = Adaptation(lambda: 1, VERIFY, DRAFT, clock)
    text = AdaptiveSize(everyone, sizes(8, 0, 4, None))
    before = everyone.times.wall(DraftSize(4), 1)
    for _ in range(3):
        choice = text.choose(100)
        assert choice.size == DraftSize(4)
        assert choice.rounds > 1
        clock.now += 50 * MS
        draft = DraftReply([0] * asked, None, None, 0, MODEL, asked=DraftSize(asked))
        text.observe(draft, VerdictReply(1, 1, 0, [0.5] * asked, MODEL))
    assert (everyone.times.wall(DraftSize(4), 1) != before) == known
    assert everyone.acceptance.chances(4).first[0] != AcceptanceEstimate().chances(4).first[0]


def test_the_first_draft_behind_plain_rounds_says_nothing_of_what_drafts_bring() -> None:
    """A head has no features of the places after them: it is empty, as no later one is."""
    everyone, (text,), _ = together(1)
    size = text.choose(1000).size

    def expected() -> float:
        return everyone.expected(size, everyone.acceptance.chances(size.gamma)).tokens

    first = expected()
    for drafted in (None, DraftReply((), None, None, 0, MODEL)):
        text.choose(1000)
        text.observe(drafted, VerdictReply(0, 0, 0, (), MODEL))
    assert expected() == first
    text.observe(DraftReply((), None, None, 0, MODEL), VerdictReply(0, 0, 0, (), MODEL))
    assert expected() < first
