"""What a scorer is fed: new tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    from torch import Tensor

    from tandem.inference.cache import SequenceCache
    from tandem.speculation.categorical import Categorical


@dataclass(slots=True, eq=False)
class Draws:
    """What one step drew for several sequences, on the device.

    Attributes:
        tokens: [R * siblings] int64, row by row.
        rows: the R distributions they were drawn from.
        siblings: the most draws of one row; padding behind fewer.
        certain: they were not drawn, but are the likeliest tokens of their rows.
    """

    tokens: Tensor
    rows: Categorical
    siblings: int = 1
    certain: bool = False


@dataclass(slots=True, eq=False)
class Drawn:
    """One sequence's draw: place `index` of a step's."""

    draws: Draws
    index: int

    def __len__(self) -> int:
        """One token."""
        return 1


@dataclass(frozen=True, slots=True)
class Feed:
    """New tokens of one sequence.

    Without parents they extend its trunk. With parents the last of them, one a parent, are branch
    rows; tokens before those extend the trunk first, and the branch rows fed earlier are then
    forgotten. A row sees the trunk, its ancestors among the branch rows, and itself.

    Attributes:
        cache: grows by them.
        token_ids: at least one; or a token, or several, that were drawn and are on the device
            only.
        rows: logits wanted, of the last tokens; may be 0.
        parents: of branch rows: 0 for the trunk's end, j for branch row j, counted from 1 in the
            order in which they were fed since the trunk last grew, in this feed or before.
    """

    cache: SequenceCache
    token_ids: Sequence[int] | Drawn | Sequence[Drawn]
    rows: int
    parents: Sequence[int] | None = None
