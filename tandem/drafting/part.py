"""Drafters that can be parts of another one."""

from __future__ import annotations

from tandem.drafting.drafter import Drafter, DraftSequence


class PartDrafter(Drafter):
    """A drafter that takes back what it observed before it was emitted.

    The method that it is a part of has it go on after what another part drafted.
    """

    def rewind(self, sequence: DraftSequence, length: int) -> None:
        """Take back the last tokens of a sequence, down to a length; none where it is shorter."""
        del sequence.token_ids[length:]
