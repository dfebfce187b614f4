"""Trees by an EAGLE head: each place from a guess of the target's feature there."""

from __future__ import annotations

from typing import ClassVar, Literal

from tandem.drafting.heads.pairs import OfPairs, PairsDrafter


class EagleDrafter(PairsDrafter):
    """EAGLE, EAGLE-2 and EAGLE-3 (arXiv 2401.15077, 2406.16858, 2503.01840)."""


class EagleRecipe(OfPairs):
    """The recipe of `eagle`."""

    drafts: ClassVar = "a tree by an EAGLE head, from hidden states of the target"
    drafter: ClassVar = EagleDrafter

    method: Literal["eagle"] = "eagle"
