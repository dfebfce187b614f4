"""What all heads have in common: how they are described, fed and measured."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tandem.errors import StartupError
from tandem.inference.feed import Feed
from tandem.inference.fingerprint import tensors_fingerprint
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.target_parts import TargetParts
from tandem.inference.output import PassOutput
from tandem.inference.passes.torch_llama import RMSNorm
from tandem.profile import PassTime


class Room(NamedTuple):
    """How much a head may hold of its sequences, where it holds any.

    Attributes:
        cache_tokens: positions, as the setting says; 0 takes what fits, and at most `at_most`.
        at_most: see `cache_tokens`.
    """

    cache_tokens: int
    at_most: int


_BATCHES, _REPEATS = (1, 4, 16), 5


class Head(ABC):
    """A small model over hidden states of a target. Implements `Model` and `HeadScorer`.

    A feed has the feature of the position before each of its first tokens, see `Feed.features`.

    Attributes:
        reads: layers of the target whose states it is fed, as `FeedbackSpec` in common.proto.
        hidden_size: width of a state.
        made_for: weights fingerprint of its target; empty where its files do not say.
        depths: most tokens of a path that it drafts.
        acceptance: by depth and sibling rank, as it was measured; empty where its files do not say.

    Args:
        files: of the head.
        target: the checkpoint that it is for; None where it needs nothing of it.
        tokenizer: fingerprint of its target's tokenizer.
        tensors: its weights, under the names of the files.
        device: where it computes.
        dtype: in which.
    """

    engine = "torch"
    improving = False
    takes_trees = True
    of_layers: tuple[int, ...] = ()
    # Its texts end where the target's do, and no sequence is too long for it.
    max_length = 2**31 - 1
    vocab_size: int
    depths: int

    def __init__(
        self,
        files: HeadFiles,
        target: TargetParts | None,
        tokenizer: str,
        tensors: dict[str, Tensor],
        device: str,
        dtype: torch.dtype,
    ) -> None:
        own = files.own
        self.acceptance = _acceptance_of(files)
        self.name = files.path.name
        self.device = torch.device(device)
        self.layers = 1
        self.eos_token_ids: list[int] = []
        self.pass_times: Sequence[PassTime] = ()
        self.forward_passes = self.fed_tokens = 0
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        self.tokenizer_fingerprint = tokenizer or str(own.get("tokenizer", ""))
        self.fingerprint = tensors_fingerprint(tensors, [files.config, str(dtype)])
        self.weights_fingerprint = self.fingerprint
        self.made_for = str(own.get("made_for", ""))
        self._dtype = dtype
        if target is None and "target_layers" not in own:
            raise StartupError(
                f"the head {files.path} does not say for which target it is: name the target's"
                " checkpoint with TANDEM_DRAFTER_TARGET"
            )
        self.target_layers = int(target.layers if target is not None else own["target_layers"])
        self.reads: tuple[int, ...] = (self.target_layers + 1,)
        self.hidden_size = 0

    @property
    def dtype(self) -> str:
        """Dtype of weights and passes."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def positions(self) -> int:
        """0: it holds nothing of a sequence."""
        return 0

    @property
    def free_positions(self) -> int:
        """0, as `positions`."""
        return 0

    def reserve(self, capacity: int, nodes: int = 0) -> Any:
        """There is nothing to reserve."""
        return ()

    def release(self, cache: Any) -> None:  # noqa: B027
        """There is nothing to release."""

    def improve(self) -> None:  # noqa: B027
        """There is no faster pass."""

    def tokenizer_json(self) -> bytes:
        """None: the target has it."""
        return b""

    def chat_template(self) -> str:
        """None: the target has it."""
        return ""

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """The rows asked for, feed by feed."""
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        return PassOutput(self._rows(feeds))

    @abstractmethod
    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        """[R, V] the rows asked for, feed by feed."""

    def no_features(self) -> list[npt.NDArray[np.int16]]:
        """Features of one position that are 0."""
        return [np.zeros((1, len(self.reads), self.hidden_size), np.int16)]

    def measure(self) -> None:
        """Find out what passes take. Only before the first sequence."""
        found: list[PassTime] = []
        with torch.inference_mode():
            for count in _BATCHES:
                caches = [self.reserve(1 + _REPEATS) for _ in range(count)]
                held = [cache for cache in caches if cache is not None]
                zeros = self.no_features()
                feeds = [Feed(cache, [0], 1, features=zeros) for cache in held]
                times = []
                for _ in range(1 + _REPEATS if len(held) == count else 0):
                    began = time.perf_counter_ns()
                    self._rows(feeds).sum().item()
                    times.append(time.perf_counter_ns() - began)
                for cache in held:
                    self.release(cache)
                if times:
                    found.append((count, 1, float(median(times[1:]))))
        self.pass_times = found


def _acceptance_of(files: HeadFiles) -> tuple[tuple[float, ...], ...]:
    """By depth and sibling rank, as the head's files say.

    Raises:
        StartupError: they are no shares that fall with the rank.
    """
    try:
        found = tuple(tuple(map(float, ranks)) for ranks in files.own.get("acceptance", ()))
        for ranks in found:
            if list(ranks) != sorted(ranks, reverse=True) or not 0 < ranks[-1] <= ranks[0] <= 1:
                raise ValueError
    except (TypeError, ValueError, IndexError):
        raise StartupError(
            f"the head {files.path}: tandem.acceptance of its config.json must hold, for each"
            " depth, shares in (0, 1] that fall with the sibling's rank"
        ) from None
    return found


def require_width(files: HeadFiles, width: int, target: TargetParts | None) -> None:
    """Refuse a head that reads hidden states of another width than its target's.

    Raises:
        StartupError: both widths.
    """
    if target is not None and target.hidden_size != width:
        raise StartupError(
            f"the head {files.path} reads hidden states of {width} numbers, and its target has"
            f" {target.hidden_size}"
        )


def norm_of(weight: Tensor, epsilon: float) -> RMSNorm:
    """A norm with a weight."""
    part: Any = nn.Module()
    part.weight, part.variance_epsilon = nn.Parameter(weight, requires_grad=False), epsilon
    return RMSNorm(part)


def features_of(feeds: Sequence[Feed], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, layers, width] the features of all feeds, feed by feed: of messages, or of the device."""
    parts = [part for feed in feeds for part in feed.features or ()]
    # An array over a message's bytes may not be written, so it is copied.
    tensors = [p if isinstance(p, Tensor) else torch.from_numpy(np.array(p)) for p in parts]
    # Nobody waits for a copy to a device; one to the host is read at once.
    waits = device.type == "cpu"
    if len({tensor.device for tensor in tensors}) > 1:  # a text whose drafter was lost
        tensors = [tensor.to(device, non_blocking=not waits) for tensor in tensors]
    states = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if states.dtype == torch.int16:
        states = states.view(torch.bfloat16)
    return states.to(device, non_blocking=not waits).to(dtype)
