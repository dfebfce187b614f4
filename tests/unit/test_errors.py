"""What is told of an exception that a library raised."""

from __future__ import annotations

import pytest

from tandem.errors import first_line


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("one line", "one line"),
        ("the first\nand pages", "the first"),
        ("\n  the first \n\nand pages", "the first"),
        (
            "Validation error for 'x':\n    ValueError: 5 is no multiple\nmore",
            "Validation error for 'x': ValueError: 5 is no multiple",
        ),
        ("a:\nb:\n\n c\nd", "a: b: c"),
        ("only:", "only:"),
        ("", "RuntimeError"),
    ],
)
def test_the_whole_reason_is_told_and_no_page(message: str, told: str) -> None:
    assert first_line(RuntimeError(message)) == told
