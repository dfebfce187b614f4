"""Which differences between two recordings are real, and which only seem so."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tandem.tools.traces.analysis import comparison
from tandem.tools.traces.analysis.comparison import Line, RequestSample, Unit, compare
from tandem.tools.traces.analysis.figures import RequestFigures
from tandem.tools.traces.analysis.stages import STAGES, TARGET, OwnedStage

FORWARD = OwnedStage(TARGET, "verify.forward")
ACCEPT = OwnedStage(TARGET, "verify.accept")


def figures(
    texts: int, seed: int, forward_ms: float = 5.0, keep: float = 0.7
) -> list[RequestFigures]:
    """Texts of 20 rounds whose times and acceptances vary."""
    numbers = random.Random(seed)
    found = []
    for text in range(texts):
        accepted = sum(numbers.random() < keep for _ in range(80))
        forward = sum(round(numbers.gauss(forward_ms, 0.5) * 1e6) for _ in range(20))
        accept = sum(round(numbers.gauss(1, 0.3) * 1e6) for _ in range(20))
        stages = {FORWARD: forward, ACCEPT: accept}
        wall, tokens = forward + accept, 21 + accepted
        found.append(
            RequestFigures(
                f"r{text}", f"t{text}", 0, wall, wall // 20, tokens, 20, 80, accepted, stages
            )
        )
    return found


def lines(
    before: list[RequestFigures], after: list[RequestFigures], unit: Unit = Unit.ROUND
) -> dict[str, Line]:
    found = compare(RequestSample(before, 0), RequestSample(after, 0), unit, seed=0)
    return {line.name: line for line in found}


def test_a_stage_that_moved_is_found_and_no_other() -> None:
    found = lines(figures(60, 1), figures(60, 2, forward_ms=6.0))
    moved = {name for name, line in found.items() if line.moved}
    assert moved == {
        "tokens/s of a request",
        "first token ms",
        "target verify.forward ms/round",
    }
    forward = found["target verify.forward ms/round"]
    assert forward.low is not None
    assert forward.high is not None
    assert forward.low < 1.0 < forward.high
    assert forward.after - forward.before == pytest.approx(1.0, abs=0.1)


def test_the_same_law_twice_shows_no_difference() -> None:
    """Of forty comparisons of equals, some two say otherwise; one in a thousand finds seven."""
    wrong = 0
    for seed in range(200, 240):
        found = lines(figures(60, 2 * seed), figures(60, 2 * seed + 1))
        wrong += any(line.moved for line in found.values())
    assert wrong <= 6


def test_a_recording_against_itself_has_no_difference_at_all() -> None:
    texts = figures(20, 3)
    for line in lines(texts, texts[::-1]).values():
        assert line.before == pytest.approx(line.after)
        assert line.moved is False


def test_texts_that_are_all_alike() -> None:
    texts = [figures(1, 3)[0]] * 10
    slower = [figures(1, 4, forward_ms=9.0)[0]] * 10
    assert not any(line.moved for line in lines(texts, texts).values())
    assert lines(texts, slower)["target verify.forward ms/round"].moved


def test_a_tokens_stages_add_up_to_its_time() -> None:
    found = lines(figures(20, 1), figures(20, 2), Unit.TOKEN)
    stages = [line.before for name, line in found.items() if name.endswith("ms/token")]
    assert len(stages) == 2
    assert sum(stages) == pytest.approx(1e3 / found["tokens/s of a request"].before)


def test_known_means() -> None:
    two = [
        RequestFigures("a", "a", 0, 10**9, 10**7, 30, 10, 40, 20, {FORWARD: 50_000_000}),
        RequestFigures("b", "b", 0, 10**9, None, 10, 10, 40, 0, {FORWARD: 70_000_000}),
    ]
    found = lines(two, two)
    assert {name: line.before for name, line in found.items()} == pytest.approx(
        {
            "tokens/s of a request": 20,
            "first token ms": 10,
            "acceptance": 0.25,
            "tokens a round": 2,
            "rounds a request": 10,
            "tokens a request": 20,
            "target verify.forward ms/round": 6,
        }
    )
    assert {line.moved for line in found.values()} == {None}


def test_the_same_seed_gives_the_same_intervals() -> None:
    before, after = figures(10, 1), figures(10, 2)
    assert lines(before, after) == lines(before, after)


def test_a_sample_of_many_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_REQUESTS", 200)
    many = [RequestFigures("", "", 0, 1, None, tokens, 0, 0, 0, {}) for tokens in range(4_000)]
    sample = RequestSample(many, seed=0)
    assert sample.count == 4_000
    assert sample.rows.shape == (200, 8 + len(STAGES))
    tokens = sample.rows[:, 4]
    # The mean of 200 even draws of 0..3999 has a standard error of 82.
    assert abs(tokens.mean() - 2_000) < 400
    assert len(set(tokens)) == 200


def test_a_mutant_that_draws_nothing_anew_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        comparison,
        "_resampled",
        lambda rows, ratios, numbers: comparison._values(
            rows.sum(axis=0)[None].repeat(10, axis=0), ratios
        ),
    )
    with pytest.raises(AssertionError):
        test_the_same_law_twice_shows_no_difference()
