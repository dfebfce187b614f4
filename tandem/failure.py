"""What a command or a benchmark cannot do, in a sentence for the person who started it."""

from __future__ import annotations


class Failure(Exception):
    """Something failed.

    Attributes:
        details: lines to show above the sentence, such as the end of a log.
    """

    def __init__(self, sentence: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.details = details


class Misconfigured(Failure):
    """It cannot work as it is set up; trying again cannot help."""
