"""Trees by Hydra's heads: each place from a feature of the target and the tokens after it."""

from __future__ import annotations

from typing import ClassVar, Literal

from tandem.drafting.heads.pairs import OfPairs, PairsDrafter


class HydraDrafter(PairsDrafter):
    """Hydra and Hydra++ (arXiv 2402.05109)."""


class HydraRecipe(OfPairs):
    """The recipe of `hydra`."""

    drafts: ClassVar = "a tree by Hydra's heads, from a hidden state of the target and the path"
    drafter: ClassVar = HydraDrafter
    unmeasured: ClassVar = ((0.45, 0.1, 0.05, 0.03), (0.42, 0.08, 0.04))

    method: Literal["hydra"] = "hydra"
