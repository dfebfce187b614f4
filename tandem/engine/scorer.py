"""What computes: the contract between the engine and a model, whatever runs its passes.

The engine schedules by `Scorer` and `Memory`; each `tandem.inference.model.Model` is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from tandem.inference.feed import Feed
    from tandem.inference.output import PassOutput


class Scorer(Protocol):
    """Turns tokens into logits."""

    @property
    def vocab_size(self) -> int:
        """Columns of its logits."""

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """The rows asked for, feed by feed; the feeds' caches grow."""

    @property
    def chains(self) -> bool:
        """Whether it may draw chains without the host between their tokens."""

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        """Such chains, see `Model.draw_on`."""


class HeadScorer(Scorer, Protocol):
    """Turns hidden states of a target into rows; see `Feed.features`.

    Attributes:
        reads: layers of the target whose states it is fed, see `FeedbackSpec` in common.proto.
        hidden_size: numbers of a state.
        made_for: weights fingerprint of its target; empty for any.
        remembers: whether it has a KV cache, and reads all features of an unbroken run; else the
            newest one alone.
        depths: most tokens of a path that it drafts.
        acceptance: by depth and sibling rank, as its files say; unchecked. () where they do not.
    """

    reads: tuple[int, ...]
    hidden_size: int
    made_for: str
    depths: int
    acceptance: Any

    @property
    def remembers(self) -> bool:
        """See the attributes."""


class Memory(Protocol):
    """Holds what sequences have computed; each reserves its part before it opens."""

    @property
    def positions(self) -> int:
        """That all sequences may hold together; 0 where it holds nothing."""

    @property
    def free_positions(self) -> int:
        """That no sequence holds."""

    @property
    def longest_free(self) -> int:
        """Positions of the largest part that could be reserved now."""

    def reserve(self, capacity: int, nodes: int = 0, held: int | None = None) -> Any:
        """A sequence's part; None where there is no room now.

        Args:
            capacity: positions that it may grow to, those for nodes included.
            nodes: of drafts, that it may hold at once beside its text.
            held: positions that it has from the start; None for all.

        Raises:
            Unsupported: the model takes no trees, and `nodes` asks for some.
        """

    def release(self, cache: Any) -> None:
        """Give a part back. It must not be in a batch any more."""
