"""Which back end is taken, by what passes take: few texts and many, drafts, busy machines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tandem.inference.choice import comparison
from tandem.inference.choice.candidates import by_torch
from tandem.inference.choice.comparison import compare, costs_of
from tandem.inference.passes.backend import Backend
from tests.support.models.tiny import random_llama

# In ms: what one text's pass takes, each further text, and each further row.
Times = tuple[float, float, float]
# Of 90 M parameters on two cores: torch takes a batch text by text.
RUNTIME, TEXT_BY_TEXT = (5.0, 0.6, 0.15), (7.0, 1.8, 0.15)


def spent(times: Times, texts: int, rows: int) -> float:
    first, text, row = times
    return 1e-3 * (first + (texts - 1) * text + texts * (rows - 1) * row)


def profile(times: Times) -> list[tuple[int, int, float]]:
    return [(n, rows, 1e9 * spent(times, n, rows)) for n in (1, 4, 16) for rows in (1, 5, 17)]


@pytest.fixture
def three() -> list[Backend]:
    with torch.inference_mode():
        return [by_torch(random_llama(seed)) for seed in range(3)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the clock: each pass takes what its back end's times say, and a delay."""

    def set_times(
        backends: Sequence[Backend], times: Sequence[Times], delay: Callable[[int], float]
    ) -> None:
        computes = [each.compute for each in backends]

        def timed(backend: Backend, caches: Sequence[Any], rows: Sequence[int], *_: Any) -> float:
            own = computes.index(backend.compute)
            return spent(times[own], len(caches), sum(rows)) * delay(own)

        monkeypatch.setattr(comparison, "timed", timed)

    return set_times


def test_costs_are_those_of_plain_and_of_drafted_texts() -> None:
    costs = costs_of(profile(RUNTIME), drafts=False)
    plain, drafted = costs[::2], costs[1::2]
    assert plain == pytest.approx([5e6, 6.8e6 / 4, 14e6 / 16, 42.8e6 / 64])
    assert all(with_drafts <= without for with_drafts, without in zip(drafted, plain, strict=True))
    # One text: 17 rows for 4.9 tokens cost less than 5 rows for 3.4.
    assert drafted[0] == pytest.approx(min(5.6e6 / 3.3616, 7.4e6 / 4.8874), rel=1e-3)
    # Where rows cost more than they yield, texts are not drafted.
    costs = costs_of(profile((5.0, 0.6, 0.8)), drafts=False)
    assert costs[6] == costs[7]
    drafts = costs_of(profile(RUNTIME), drafts=True)
    assert drafts[0] == pytest.approx((5.3e6 + 3 * 5e6) / 4)


@torch.inference_mode()
def test_a_batch_counts_as_much_as_one_text(
    three: list[Backend], timed: Callable[..., None]
) -> None:
    """A back end that is ahead at one text alone is not taken."""
    ahead_at_one = (4.8, *TEXT_BY_TEXT[1:])
    timed(three, (ahead_at_one, RUNTIME, TEXT_BY_TEXT), lambda _: 1.0)
    with capture_logs() as logs:
        found = compare(three, drafts=False)
    assert (found.best, found.sure) == (1, True)
    assert found.lead > 1.2
    assert [each[:2] for each in found.profile] == [each[:2] for each in profile(RUNTIME)]
    expected = [each[2] for each in profile(RUNTIME)]
    assert [each[2] for each in found.profile] == pytest.approx(expected)
    (line,) = logs
    assert line["rounds"] == 3, "nothing is close: it ends early"
    assert line["taken"] == "torch float32"


@torch.inference_mode()
def test_what_is_close_changes_nothing(three: list[Backend], timed: Callable[..., None]) -> None:
    timed(three, [(5.0 - 0.05 * own, 0.6, 0.15) for own in range(3)], lambda _: 1.0)
    with capture_logs() as logs:
        found = compare(three, drafts=True)
    assert (found.best, found.sure) == (0, False)
    assert found.lead < 1
    assert logs[0]["rounds"] == 9, "it goes on as long as there is time"


@torch.inference_mode()
def test_of_two_that_are_close_the_earlier_one_is_taken(
    three: list[Backend], timed: Callable[..., None]
) -> None:
    """Whichever of them is ahead at the moment."""
    for close in ((4.9, 0.6, 0.15), (5.1, 0.6, 0.15)):
        timed(three, (TEXT_BY_TEXT, RUNTIME, close), lambda _: 1.0)
        with capture_logs():
            assert compare(three, drafts=False).best == 1


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(10))
def test_a_busy_machine_finds_the_same(
    seed: int, three: list[Backend], timed: Callable[..., None]
) -> None:
    """Passes are held up at random: most take twice as long, some six times."""
    rng = random.Random(seed)
    delays = (1.0, 2.0, 2.0, 2.0, 6.0)
    timed(three, (TEXT_BY_TEXT, RUNTIME, TEXT_BY_TEXT), lambda _: rng.choice(delays))
    with capture_logs():
        assert compare(three, drafts=False).best == 1


@torch.inference_mode()
def test_one_moment_makes_nothing_clear(three: list[Backend], timed: Callable[..., None]) -> None:
    """Another program runs whenever the first rounds measure one of them."""
    passes = [0, 0, 0]

    def held_up(own: int) -> float:
        passes[own] += 1
        return 8.0 if own == 1 and passes[own] <= 2 * 9 else 1.0

    timed(three, (TEXT_BY_TEXT, RUNTIME, TEXT_BY_TEXT), held_up)
    with capture_logs():
        found = compare(three, drafts=False)
    assert (found.best, found.sure) == (1, False)


@torch.inference_mode()
def test_a_slow_model_is_measured_with_few_texts(
    three: list[Backend], timed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(three, (TEXT_BY_TEXT, RUNTIME, RUNTIME), lambda _: 1.0)
    monkeypatch.setattr(comparison, "_SECONDS", 0.0)
    with capture_logs():
        found = compare(three, drafts=False)
    assert [shape[:2] for shape in found.profile] == [(1, 1), (1, 5), (1, 17)]
    assert found.best == 1
