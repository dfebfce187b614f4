"""Drafts by looking up what followed the last tokens before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from array import array

from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.engine.asks import Steps
from tandem.speculation.draft import Draft

# Of a token in an array of the type that is wide enough for every id.
_BYTES = array("Q").itemsize


class LookupDrafter(Drafter):
    """Continues the text as it went on where its last n-gram came before; certain tokens.

    Needs no model. A certain row does not follow from the tokens before it alone but from where
    the round began, so its drafts are not pure.

    Args:
        longest: n-gram that is looked for, in tokens; shorter ones follow, down to one.
        window: tokens that are searched, the text's last.
    """

    name = "lookup"

    def __init__(self, longest: int, window: int) -> None:
        self._longest = longest
        self._window = window

    def draft(
        self, sequence: DraftSequence, round_: int, gamma: int, max_nodes: int = 0
    ) -> Steps[Draft]:
        """What followed the latest earlier place; nothing where there is none."""
        yield from ()
        gamma = min(gamma, max_nodes or gamma)
        text = sequence.token_ids[-self._window :]
        packed = array("Q", text).tobytes()
        for length in range(min(self._longest, len(text) - 1), 0, -1):
            place = _latest(packed, length)
            if place is not None:
                return Draft.certain(text[place : place + gamma])
        return Draft.certain(())


def _latest(packed: bytes, length: int) -> int | None:
    """Behind the latest earlier place of the last `length` tokens; None where there is none."""
    tail = packed[-length * _BYTES :]
    start = packed.rfind(tail, 0, len(packed) - _BYTES)
    while start % _BYTES and start >= 0:  # across two tokens
        start = packed.rfind(tail, 0, start + len(tail) - 1)
    return start // _BYTES + length if start >= 0 else None
