"""Drafts by looking up what followed the last tokens before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.drafting.drafter import Drafter, DraftSequence, Recipe, Setting
from tandem.drafting.part import PartDrafter
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.speculation.draft import Draft

# Of a token in an array of the type that is wide enough for every id.
_BYTES = array("Q").itemsize


class LookupDrafter(PartDrafter):
    """Continues the text as it went on where its last n-gram came before; certain tokens.

    Needs no model. It is not pure: what it guesses at a position depends on where this round
    started, and it guesses nothing where it finds nothing.

    Args:
        longest: n-gram that is looked for, in tokens; shorter ones follow, down to one.
        window: tokens that are searched, the text's last.
    """

    def __init__(self, longest: int, window: int) -> None:
        self._longest = longest
        self._window = window

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """What followed the latest earlier place; nothing where there is none."""
        yield from ()
        gamma = min(gamma, budget)
        text = sequence.token_ids[-self._window :]
        packed = array("Q", text).tobytes()
        for length in range(min(self._longest, len(text) - 1), 0, -1):
            place = _latest(packed, length)
            if place is not None:
                return Draft.certain(text[place : place + gamma])
        return Draft.certain(())


def _latest(packed: bytes, length: int) -> int | None:
    """After the latest earlier place of the last `length` tokens; None where there is none."""
    tail = packed[-length * _BYTES :]
    start = packed.rfind(tail, 0, len(packed) - _BYTES)
    while start % _BYTES and start >= 0:  # across two tokens
        start = packed.rfind(tail, 0, start + len(tail) - 1)
    return start // _BYTES + length if start >= 0 else None


class LookupRecipe(Recipe):
    """The recipe of `lookup`."""

    drafts: ClassVar = "what followed an earlier occurrence of the text's last tokens; no model"
    drafter: ClassVar = LookupDrafter

    method: Literal["lookup"] = "lookup"
    ngram: Annotated[
        int,
        Field(ge=1, le=16),
        Setting(
            "lookup_ngram",
            "length of the longest n-gram of last tokens to look for; shorter ones are tried next",
        ),
    ] = 3
    window: Annotated[
        int,
        Field(ge=2, le=65_536),
        Setting("lookup_window", "how many of the text's last tokens are searched"),
    ] = 4096

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`."""
        return LookupDrafter(self.ngram, self.window)
