"""What computes: the contract between the engine and a model, whoever runs its passes.

The engine schedules by `Scorer` and `Memory`; a service describes itself by `Model`, which is both.
`tandem.inference.decoder.Decoder` is one, over any back end; another engine would be another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tandem.profile import PassTime

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    import torch

    from tandem.inference.feed import Feed
    from tandem.inference.output import PassOutput


class Scorer(Protocol):
    """Turns tokens into logits.

    Attributes:
        vocab_size: columns of its logits.
    """

    vocab_size: int

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """The rows asked for, feed by feed; the feeds' caches grow."""


class HeadScorer(Scorer, Protocol):
    """Turns hidden states of a target into rows; see `Feed.features`.

    Attributes:
        reads: layers of the target whose states it is fed, see `FeedbackSpec` in common.proto.
        hidden_size: numbers of a state.
        made_for: weights fingerprint of its target; empty for any.
        remembers: whether it reads all features of a run; else the newest one alone.
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

    def reserve(self, capacity: int, nodes: int = 0) -> Any:
        """A sequence's part; None where there is no room now.

        Args:
            capacity: positions, those for nodes included.
            nodes: of drafts, that it may hold at once beside its text.

        Raises:
            Unsupported: the model takes no trees, and `nodes` asks for some.
        """

    def release(self, cache: Any) -> None:
        """Give a part back. It must not be in a batch any more."""


class Model(Scorer, Memory, Protocol):
    """A model that a service serves, and what the service tells of it.

    Attributes:
        name: of the checkpoint.
        fingerprint: of weights, configuration and tokenizer; equal ones have the same law.
        tokenizer_fingerprint: of the tokenizer alone; empty where it has none.
        weights_fingerprint: of weights rounded to bfloat16, and configuration: the same in float32
            and bfloat16.
        hidden_size: width of hidden states.
        layers: of the model.
        of_layers: whose hidden states its passes can give; see `FeedbackSpec` in common.proto.
        probe_tokens: extra embeddings, which the ids from `vocab_size` on name.
        eos_token_ids: that end a text.
        max_length: positions of its longest sequence.
        parameters: how many it has.
        device: that computes it.
        forward_passes: calls since the start.
        fed_tokens: of all passes.
        improving: a faster pass is still looked for.
        pass_times: measured passes of new sequences; none before `measure`.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    weights_fingerprint: str
    hidden_size: int
    layers: int
    of_layers: tuple[int, ...]
    probe_tokens: int
    eos_token_ids: list[int]
    max_length: int
    parameters: int
    device: torch.device
    forward_passes: int
    fed_tokens: int
    improving: bool
    pass_times: Sequence[PassTime]

    @property
    def engine(self) -> str:
        """What computes the passes of new sequences, such as "torch"."""

    @property
    def dtype(self) -> str:
        """In which new sequences are computed, such as "float32"."""

    @property
    def takes_trees(self) -> bool:
        """Whether new sequences may have branches."""

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""

    def improve(self) -> None:
        """Look for a faster pass. Slow; from any thread, once."""

    def close(self) -> None:
        """End what it has outside of this process; behind its last pass."""

    def tokenizer_json(self) -> bytes:
        """The serialised fast tokenizer; empty where there is none."""

    def chat_template(self) -> str:
        """The Jinja template of chats; empty where there is none."""

    def special_tokens(self) -> dict[str, str]:
        """Texts of tokens by the names that the template has for them."""
