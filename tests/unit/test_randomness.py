"""Random numbers are Philox 4x32-10 of (seed, purpose, round, row), and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.speculation.randomness import (
    Draws,
    Lookahead,
    Purpose,
    integers,
    philox4x32,
    uniforms,
)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    counters = np.array([counter, counter], dtype=np.uint64).T
    keys = np.array([key, key], dtype=np.uint64).T
    assert philox4x32(counters, keys).T.tolist() == [expected, expected]


def test_a_row_does_not_depend_on_how_many_are_asked_for() -> None:
    one, nine = Draws(7, Purpose.ACCEPT, 3, 1), Draws(7, Purpose.ACCEPT, 3, 9)
    other = Draws(8, Purpose.RESIDUAL, 2, 2)
    assert uniforms(one)[0] == uniforms(nine)[0] == uniforms(other, nine)[2]


def test_no_two_purposes_rounds_or_rows_share_a_number() -> None:
    drawn = [
        value
        for purpose in Purpose
        for round_ in (0, 1, 2, 2**32, 2**40)
        for value in integers(Draws(0, purpose, round_, 5))
    ]
    assert len(set(drawn)) == len(drawn)


def test_every_bit_of_the_seed_counts() -> None:
    seeds = (0, 1, 2**32, 2**63)
    firsts = {float(uniforms(Draws(seed, Purpose.RESIDUAL, 0, 1))[0]) for seed in seeds}
    assert len(firsts) == 4


def test_uniforms_are_uniform_with_53_bits() -> None:
    values = uniforms(Draws(11, Purpose.DRAFT, 0, 100_000))
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 5 / np.sqrt(12 * len(values))
    assert (values * 2**53 == np.floor(values * 2**53)).all()
    assert (values * 2**30 != np.floor(values * 2**30)).any()


def test_no_draws_are_none() -> None:
    assert len(uniforms()) == 0
    assert integers(Draws(0, Purpose.DRAFT, 0, 0)) == []


def test_looking_ahead_changes_no_number() -> None:
    calls: list[tuple[int, int]] = []

    def compute(round_: int, count: int) -> list[int]:
        calls.append((round_, count))
        return integers(Draws(3, Purpose.DRAFT, round_, count))

    numbers = Lookahead(compute)
    plain = Lookahead(lambda round_, count: integers(Draws(3, Purpose.DRAFT, round_, count)))
    numbers.prepare(5, 4)
    assert numbers.take(5, 4) == plain.take(5, 4)
    assert calls == [(5, 4)]
    for unforeseen in ((5, 3), (6, 4), (4, 4)):
        assert numbers.take(*unforeseen) == plain.take(*unforeseen)
    assert len(calls) == 4
