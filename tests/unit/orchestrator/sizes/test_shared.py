"""What texts learn together, and what none may learn from a passing mixture of texts."""

from __future__ import annotations

from orchestrator.sizes.acceptance import AcceptanceEstimate
from orchestrator.sizes.adaptive import AdaptiveSize
from orchestrator.sizes.goodput import PLAIN, sizes
from orchestrator.sizes.shared import Adaptation
from orchestrator.sizes.trials import ROUNDS
from orchestrator.text.contracts import Decided, Drafted, DraftSize, Expected
from tandem.telemetry.stages import StageTimes
from tests.support.simulated_services import MS

TEXTS, LOAD = 8, 3
MODEL = StageTimes(forward_ns=MS)
PLAINLY = {PLAIN: 10, DraftSize(4): 80}


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def together(known: dict[DraftSize, int]) -> tuple[Adaptation, list[AdaptiveSize], Clock]:
    """Texts that know what rounds take, in milliseconds."""
    clock = Clock()
    everyone = Adaptation(lambda: TEXTS, clock)
    for size, wall in known.items():
        draft = MODEL if size.gamma else None
        for _ in range(40):
            everyone.times.add(LOAD, size, wall * MS, draft, MODEL, home=False)
    texts = [AdaptiveSize(everyone, sizes(8, 0, None, None)) for _ in range(TEXTS)]
    for text in texts:
        assert text.begins_drafting == (min(known, key=known.__getitem__) != PLAIN)
    return everyone, texts, clock


def step(
    texts: list[AdaptiveSize], clock: Clock, wall: int, drafting: int = TEXTS
) -> list[DraftSize]:
    """A round of all texts, of which the first so many have drafters; what they chose."""
    chosen = [text.choose(1000).size for text in texts]
    clock.now += wall * MS
    for at, (text, size) in enumerate(zip(texts, chosen, strict=True)):
        gamma = size.gamma if at < drafting else 0
        draft = Drafted([0] * gamma, None, None, 0, MODEL) if gamma else None
        text.observe(draft, Decided(0, 0, 0, [0.1] * gamma, MODEL))
    return chosen


def known_of(everyone: Adaptation) -> tuple[Expected, Expected]:
    """What a draft and a plain round are expected to bring."""
    chances = everyone.acceptance.chances(8)
    expected, best = (everyone.expected(size, chances) for size in (DraftSize(4), PLAIN))
    assert expected is not None
    assert best is not None
    return expected, best


def begin_trial(everyone: Adaptation, clock: Clock) -> None:
    """Of drafts, by all texts that decode plainly."""
    expected, best = known_of(everyone)
    everyone.trials.earn(LOAD, PLAIN, TEXTS, 1)
    assert everyone.trials.begin(DraftSize(4), LOAD, TEXTS, expected, best, clock.now)


def test_plain_rounds_of_several_texts_are_alike_until_a_trial_begins() -> None:
    everyone, texts, clock = together(PLAINLY)
    assert step(texts, clock, 10) == [PLAIN] * TEXTS
    choices = [text.choose(1000) for text in texts]
    for text in texts:
        text.observe(None, Decided(0, 0, 0, times=MODEL))
    again = [text.choose(1000) for text in texts]
    assert all(one is other for one, other in zip(choices, again, strict=True))
    for text in texts:
        text.observe(None, Decided(0, 0, 0, times=MODEL))
    begin_trial(everyone, clock)
    known = everyone.times.at(LOAD)
    assert known is not None
    before = known.walls[DraftSize(4)].count
    while step(texts, clock, 80) == [DraftSize(4)] * TEXTS:
        assert clock.now < 10_000 * MS
    assert known.walls[DraftSize(4)].count == before + ROUNDS
    # Drafts are now among plain rounds, those that nobody looks at too.
    for _ in range(TEXTS // 2):
        everyone.mix.enter(True)
    began = clock.now = clock.now + MS
    clock.now += MS
    assert not everyone.mix.leave(True, began)


def test_no_plain_round_is_left_out_of_what_trials_may_cost() -> None:
    """Rounds that nobody looked at are counted with the next one that is."""
    everyone, texts, clock = together(PLAINLY)
    before = everyone.trials.stale(LOAD, DraftSize(4), TEXTS, 16)
    rounds = 0
    while not everyone.trials.stale(LOAD, DraftSize(4), TEXTS, 16):
        step(texts, clock, 10)
        rounds += 1
        assert rounds < 200
    assert not before
    assert 128 <= rounds <= 128 + 8


def test_texts_whose_drafters_are_being_opened_teach_nothing_of_times() -> None:
    """Neither is what they wait beside others' openings a plain round's time, nor what a few texts
    need that have their drafters already a drafted one's."""
    everyone, texts, clock = together({PLAIN: 10, DraftSize(4): 9})
    assert step(texts, clock, 9)[0].gamma  # a text's first round is not counted
    known = everyone.times.at(LOAD)
    assert known is not None

    def seen() -> dict[DraftSize, float]:
        return {size: mean.count for size, mean in known.walls.items()}

    before = seen()
    for _ in range(12):
        step(texts, clock, 50, drafting=2)
    for _ in range(12):
        step(texts, clock, 50, drafting=0)
    step(texts, clock, 50)  # all had gone into it without a drafter
    assert seen() == before
    for _ in range(12):
        step(texts, clock, 50)
    assert seen() != before


def test_a_trial_of_all_texts_ends_when_more_come() -> None:
    everyone, _, clock = together(PLAINLY)
    begin_trial(everyone, clock)
    trials = everyone.trials
    assert trials.running(LOAD, TEXTS + 2, clock.now) is not None
    assert trials.running(LOAD + 1, TEXTS + 3, clock.now) is None


def test_a_trial_waits_for_drafters_and_not_for_ever() -> None:
    everyone, _, clock = together(PLAINLY)
    begin_trial(everyone, clock)
    trials = everyone.trials
    itself = 4 * ROUNDS * PLAINLY[DraftSize(4)]
    assert trials.running(LOAD, TEXTS, (itself + 60 * PLAINLY[PLAIN]) * MS) is not None
    assert trials.running(LOAD, TEXTS, (itself + 70 * PLAINLY[PLAIN]) * MS) is None


def test_rounds_that_wait_for_drafters_in_a_trial_are_no_gain() -> None:
    """They were to yield a draft's tokens, and yield one."""
    everyone, texts, clock = together(PLAINLY)
    begin_trial(everyone, clock)
    trial = everyone.trials.current
    assert trial is not None
    expected, best = known_of(everyone)
    everyone.trials.spend(trial, 62.0, TEXTS)  # nearly all that there is at the start
    for _ in range(20):
        step(texts, clock, 10, drafting=0)
    assert everyone.trials.current is trial
    trial.left = 0
    assert everyone.trials.running(LOAD, TEXTS, clock.now) is None
    assert not everyone.trials.begin(DraftSize(4), LOAD, TEXTS, expected, best, clock.now)


def test_what_a_trial_cost_is_paid_back_before_the_next() -> None:
    """One round in a hundred, for sixteen rounds of each text at most."""
    everyone, _, clock = together(PLAINLY)
    begin_trial(everyone, clock)
    trials, trial = everyone.trials, everyone.trials.current
    assert trial is not None
    expected, best = known_of(everyone)
    trials.spend(trial, 10_000.0, TEXTS)
    trial.left = 0
    assert trials.running(LOAD, TEXTS, clock.now) is None
    owed = 16 * TEXTS * 100
    trials.earn(LOAD, PLAIN, TEXTS, owed)
    assert not trials.begin(DraftSize(4), LOAD, TEXTS, expected, best, clock.now)
    trials.earn(LOAD, PLAIN, TEXTS, owed // 16)
    assert trials.begin(DraftSize(4), LOAD, TEXTS, expected, best, clock.now)


def test_chances_are_weighed_anew_when_something_was_seen() -> None:
    shared = AcceptanceEstimate()
    own, other = AcceptanceEstimate(shared), AcceptanceEstimate(shared)
    before, beside = own.chances(4), other.chances(4)
    assert own.chances(4) is before
    assert own.chances(2).first == before.first[:2]
    own.observe(Drafted([0] * 2, None, None, 0, MODEL), Decided(0, 0, 0, [0.0, 0.0], MODEL))
    assert own.chances(4).first[0] < before.first[0]
    assert other.chances(4).first[0] < beside.first[0]  # by what all have seen
