"""Random numbers are Philox 4x32-10 of (seed, purpose, round, row), and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.speculation.randomness import (
    Purpose,
    RandomNumbers,
    digits,
    foresee,
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


def values(seed: int, purpose: Purpose, round_: int, count: int) -> list[float]:
    row: list[float] = RandomNumbers(seed, purpose, uniforms).take(round_, count).tolist()
    return row


def test_a_row_does_not_depend_on_how_many_are_asked_for() -> None:
    one, nine = (values(7, Purpose.ACCEPT, 3, count) for count in (1, 9))
    assert one == nine[:1]


def test_no_two_purposes_rounds_or_rows_share_a_number() -> None:
    drawn = [
        tuple(value)
        for purpose in Purpose
        for round_ in (0, 1, 2, 2**32, 2**40)
        for value in RandomNumbers(0, purpose, digits).take(round_, 5).tolist()
    ]
    assert len(set(drawn)) == len(drawn)


def test_every_bit_of_the_seed_counts() -> None:
    seeds = (0, 1, 2**32, 2**63)
    assert len({values(seed, Purpose.RESIDUAL, 0, 1)[0] for seed in seeds}) == 4


def test_uniforms_are_uniform_with_53_bits() -> None:
    values = RandomNumbers(11, Purpose.DRAFT, uniforms).take(0, 100_000)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 5 / np.sqrt(12 * len(values))
    assert (values * 2**53 == np.floor(values * 2**53)).all()
    assert (values * 2**30 != np.floor(values * 2**30)).any()


def test_what_is_foreseen_is_what_would_have_been_computed() -> None:
    """Whatever was asked for before, in whatever order, alone or with others."""
    foreseen = RandomNumbers(5, Purpose.ACCEPT, uniforms)
    for round_, count in (
        (0, 3),
        (1, 3),
        (15, 3),
        (16, 3),
        (2, 7),
        (3, 2),
        (2**40, 3),
        (1, 1),
        (2**64 - 1, 3),
    ):
        found = foreseen.take(round_, count).tolist()
        assert found == values(5, Purpose.ACCEPT, round_, count), round_
        assert foreseen.covers(round_, count)


def test_many_requests_are_foreseen_in_one_call() -> None:
    wanted = [
        (RandomNumbers(seed, purpose, uniforms), seed, 2 + seed)
        for seed in range(3)
        for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)
    ]
    foresee(wanted)
    for number, (foreseen, round_, count) in enumerate(wanted):
        purpose = (Purpose.ACCEPT, Purpose.RESIDUAL)[number % 2]
        assert foreseen.covers(round_, count)
        assert not foreseen.covers(round_, count + 1)
        assert foreseen.take(round_ + 3, count).tolist() == values(
            number // 2, purpose, round_ + 3, count
        )


def test_the_numbers_are_those_of_the_words() -> None:
    """Of the first known answer: 53 bits of two words, or both words as they are."""
    words = np.array([[0x6627E8D5], [0xE169C58D], [0], [0]], dtype=np.uint64)
    assert digits(words).tolist() == [[0x6627E8D5, 0xE169C58D]]
    bits = (0x6627E8D5 >> 5 << 26) | (0xE169C58D >> 6)
    assert uniforms(words).tolist() == [bits / 2**53]
