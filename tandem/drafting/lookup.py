"""Drafts by looking up what followed the last tokens before (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.engine.asks import Steps
from tandem.speculation.draft import Draft


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

    def draft(self, sequence: DraftSequence, round_: int, gamma: int) -> Steps[Draft]:
        """What followed the latest earlier place; nothing where there is none."""
        yield from ()
        text = sequence.token_ids[-self._window :]
        for length in range(min(self._longest, len(text) - 1), 0, -1):
            tail = text[-length:]
            for start in range(len(text) - length - 1, -1, -1):
                if text[start : start + length] == tail:
                    end = start + length
                    return Draft.certain(text[end : end + gamma])
        return Draft.certain(())
