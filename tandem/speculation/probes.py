"""Tokens that are computed beside a draft and never accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probes:
    """What a drafter wants to see predictions after, see `Probes` in common.proto.

    Attributes:
        token_ids: in the order in which they are computed; from the target's vocabulary size on,
            extra embeddings.
        parents: the place that each hangs at: of a draft's N candidates, or N + 1 + j after probe
            j.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def fault(self, homes: Sequence[int], vocab_size: int, extra: int) -> str:
        """What is wrong, beginning with the field's name; empty if nothing.

        Args:
            homes: the place that each candidate leads to; a twin's is another one than its own.
            vocab_size: the target's.
            extra: its extra embeddings.
        """
        if len(self.parents) != len(self.token_ids):
            return (
                f"draft.probes.parents holds {len(self.parents)} places for"
                f" {len(self.token_ids)} probes"
            )
        if self.token_ids and (largest := max(self.token_ids)) >= vocab_size + extra:
            return (
                f"draft.probes.token_ids holds id {largest}; the target's vocabulary has"
                f" {vocab_size} and {extra} extra embeddings"
            )
        for probe, parent in enumerate(self.parents):
            if parent > len(homes) + probe:
                return f"draft.probes.parents[{probe}] = {parent} does not come before its probe"
            if 0 < parent <= len(homes) and homes[parent - 1] != parent:
                return (
                    f"draft.probes.parents[{probe}] = {parent} is after a repeated sibling, which"
                    " is not computed"
                )
        return ""

    def behind(self, place: int, candidates: int) -> list[int]:
        """The places of the probes after a candidate's place, without another candidate between.

        Args:
            place: the candidate's.
            candidates: their number.
        """
        found: list[int] = []
        for probe, parent in enumerate(self.parents):
            if parent == place or (parent > candidates and parent in found):
                found.append(candidates + 1 + probe)
        return found


NO_PROBES = Probes()
