"""A loaded model, whatever computes its passes: what services use of it besides its passes.

The engine sees a model as a `Scorer` and a `Memory`, see `tandem.engine.scorer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.errors import Unsupported
from tandem.profile import PassTime

if TYPE_CHECKING:  # a service without a model runs where torch is not installed
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from tandem.inference.description import Description
    from tandem.inference.feed import Feed
    from tandem.inference.loading.checkpoint import LoadedCheckpoint
    from tandem.inference.output import PassOutput


class Model(ABC):
    """What a service loads, runs and describes: a decoder, a head, or a model of another engine.

    Attributes:
        about: what is told of it.
        device: that computes it.
        pass_times: of new sequences, as `measure` found them; none before it.
        forward_passes: calls since the start.
        fed_tokens: positions computed by those calls.
        improving: whether `improve` may still find a faster pass.
    """

    about: Description
    device: torch.device
    pass_times: Sequence[PassTime] = ()
    forward_passes = 0
    fed_tokens = 0
    improving = False

    @property
    def vocab_size(self) -> int:
        """Columns of its logits."""
        return self.about.vocab_size

    @property
    def masked(self) -> torch.Tensor | None:
        """[n] ids that its rows never give, on its device; None for none."""
        import torch

        ids = self.about.masked_ids
        return torch.tensor(ids, device=self.device) if ids else None

    @property
    @abstractmethod
    def engine(self) -> str:
        """What computes the passes of new sequences: "torch", "openvino" or "vllm"."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Of weights and passes of new sequences, such as "float32"."""

    @property
    @abstractmethod
    def takes_trees(self) -> bool:
        """Whether new sequences may have branches."""

    @property
    @abstractmethod
    def pool(self) -> Any:
        """Of the KV cache of new sequences, in a form of its own; None where nothing is held."""

    @property
    def positions(self) -> int:
        """Positions that all sequences may hold together; 0 without a pool."""
        return 0 if self.pool is None else int(self.pool.positions)

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""
        return 0 if self.pool is None else int(self.pool.free_positions)

    @property
    def kept_positions(self) -> int:
        """Of these, positions whose prefixes can be found."""
        return 0 if self.pool is None else int(self.pool.kept_positions)

    @property
    def longest_free(self) -> int:
        """Positions of the largest part that a sequence could get now."""
        return 0 if self.pool is None else int(self.pool.longest_free)

    @abstractmethod
    def reserve(self, capacity: int, nodes: int = 0, held: int | None = None) -> Any:
        """Room for a sequence; None if there is none now.

        Args:
            capacity: positions, including those for branch rows.
            nodes: most branch rows at a time; 0 for a sequence without branches.
            held: positions that it has from the start, see `PositionPool.reserve`; None for all.

        Raises:
            Unsupported: the model takes no trees, and `nodes` asks for some.
        """

    @abstractmethod
    def release(self, cache: Any) -> None:
        """Free a sequence's room. The sequence must no longer be in a batch."""

    def forget_prefixes(self) -> int:
        """Let no new sequence find what was computed before; positions that only this held. From
        any thread. Most models share nothing.

        Raises:
            Unsupported: only a restart does this.
        """
        return 0

    @abstractmethod
    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """Feed new tokens of several sequences in one pass.

        Args:
            feeds: of different sequences, at least one; their caches grow.

        Returns:
            The rows asked for, feed by feed, in the dtype of the passes.
        """

    @property
    def chains(self) -> bool:
        """Whether `draw_on` may do something."""
        return False

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        """Draw a token after each feed, then one after that, and so on, as far as this can be
        done without the host between them. Most models cannot.

        Args:
            feeds: of different sequences, a token each, at the ends of trunks.
            asked: [S, R, columns] for S steps: of each feed's row, see `kernels.draws.asked_of`.

        Returns:
            [N, R, 1 + 2 K] for the first N steps, see `kernels.draws.draw`; the caches grow by N
            tokens, the last ones drawn not among them. None where nothing is done.
        """
        return None

    def renewed(self, read: Callable[[], LoadedCheckpoint]) -> Callable[[], None]:
        """Make passes with other weights, of the kinds that serve now. Slow; from any thread, but
        not before `improve` has ended.

        Args:
            read: gives the same checkpoint with other weights; it is not read where there is no
                room for it.

        Returns:
            Gives them to new sequences; open ones keep theirs.

        Raises:
            Unsupported: its weights cannot change while it serves.
            StartupError: the passes cannot be made.
            MemoryError: there is no room for the weights and a further KV cache, or to capture the
                passes.
        """
        raise Unsupported(f"the weights of {self.about.name} cannot change while it serves")

    @abstractmethod
    def measure(self, longest: int) -> None:
        """Find out what passes take; only before the first sequence. Where that fails, nothing is
        known.

        Args:
            longest: positions of the longest sequence.
        """

    def improve(self) -> None:  # noqa: B027
        """Look for a faster pass. Slow; once, from any thread. Most models have only one."""

    def close(self) -> None:  # noqa: B027
        """End what it has outside of this process, after its last pass. Most have nothing."""
