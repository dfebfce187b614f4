"""What all heads have in common: how they are described, fed and measured."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.errors import StartupError
from tandem.inference.description import Description
from tandem.inference.feed import Feed
from tandem.inference.fingerprint import tensors_fingerprint
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.parameters import HeadParameters
from tandem.inference.heads.target_parts import TargetParts
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.inference.kv.size import Room, cache_size, told_without_room
from tandem.inference.loading.learnt_weights import LearntWeights, put_in
from tandem.inference.model import Model
from tandem.inference.output import PassOutput
from tandem.lengths import ANY_LENGTH
from tandem.profile import PassTime


@dataclass(frozen=True)
class HeadSource:
    """What a head is made of, and for which place.

    Attributes:
        files: of the head.
        target: the checkpoint that it is for; None if it was not named.
        tokenizer: fingerprint of its target's tokenizer; empty if it is unknown.
        device: where it computes.
        dtype: in which.
        room: for what it holds of sequences.
    """

    files: HeadFiles
    target: TargetParts | None
    tokenizer: str
    device: torch.device
    dtype: torch.dtype
    room: Room

    def embedding(self) -> Tensor:
        """The target's, for a head without one.

        Raises:
            StartupError: the target was not named.
        """
        return self._target("embedding").embedding()

    def output(self) -> Tensor:
        """The target's output matrix, for a head without one.

        Raises:
            StartupError: the target was not named.
        """
        return self._target("output matrix").output()

    def _target(self, part: str) -> TargetParts:
        if self.target is None:
            raise StartupError(
                f"the head {self.files.path} has no {part}: name its target's checkpoint, which has"
                " it, with TANDEM_DRAFTER_TARGET"
            )
        return self.target

    def require_width(self, width: int) -> None:
        """Refuse a head that reads hidden states of another width than its target's.

        Raises:
            StartupError: both widths.
        """
        if self.target is not None and self.target.hidden_size != width:
            raise StartupError(
                f"the head {self.files.path} reads hidden states of {width} numbers, and its target"
                f" has {self.target.hidden_size}"
            )

    def placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors on the device; those of real numbers in the dtype."""
        return {
            name: part.to(self.device, self.dtype if part.is_floating_point() else part.dtype)
            for name, part in tensors.items()
        }


_BATCHES, _REPEATS = (1, 4, 16), 5
# Versions of weights that only open sequences use.
_MOST_EARLIER = 2


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The weights of a version that can change while a head serves.

    Attributes:
        version: how often they changed; 0 for those of the files.
        parts: in the family's own form.
    """

    version: int
    parts: Any


@dataclass(eq=False, slots=True)
class HeadCache(SequenceCache):
    """What a sequence of a head holds.

    Attributes:
        weights: that compute it, from its beginning to its end; None before it is reserved.
    """

    weights: HeadWeights | None = None

    @property
    def weights_version(self) -> int:
        """See `SequenceCache`."""
        return 0 if self.weights is None else self.weights.version


class Head(Model):
    """A small model over hidden states of a target; see `HeadScorer` in `tandem.engine.scorer`.

    A feed has the feature of the position before each of its tokens, see `Feed.features`.

    Attributes:
        cache: what a sequence holds.
        reads: layers of the target whose states it is fed, as `FeedbackSpec` in common.proto.
        hidden_size: width of a state.
        made_for: weights fingerprint of its target; empty where its files do not say.
        depths: most tokens of a path that it drafts.
        learnt_depths: depths that are trained while it serves.
        guesses_states: whether what its output matrix reads is a guess of the target's last hidden
            state there.
        acceptance: by depth and sibling rank, as its files say; unchecked, and empty where they do
            not.

    Args:
        source: of it.
        tensors: its weights, and what it takes of its target.
    """

    cache: ClassVar[type[HeadCache]] = HeadCache
    engine = "torch"
    takes_trees = True
    hidden_size = 0
    depths: int
    learnt_depths: int
    guesses_states = False

    # Of new sequences.
    _weights: HeadWeights
    # Of a decoder layer, for a head that has one.
    _pool: KVPool | None = None

    def __init__(self, source: HeadSource, tensors: Mapping[str, Tensor]) -> None:
        files, own = source.files, source.files.own
        self.device, self._dtype, self._source = source.device, source.dtype, source
        self._open: WeakSet[HeadWeights] = WeakSet()
        fingerprint = tensors_fingerprint(tensors, [files.config, str(source.dtype)])
        # Its texts end where the target's do.
        self.about = Description(
            name=files.path.name,
            vocab_size=0,
            max_length=ANY_LENGTH,  # no sequence is too long for a head without a decoder layer
            parameters=sum(tensor.numel() for tensor in tensors.values()),
            hidden_size=0,
            layers=1,
            tokenizer_fingerprint=source.tokenizer or str(own.get("tokenizer", "")),
            fingerprint=fingerprint,
            weights_fingerprint=fingerprint,
        )
        self.made_for = str(own.get("made_for", ""))
        self.acceptance: Any = own.get("acceptance", ())
        if source.target is not None:
            target_layers = source.target.layers
        elif "target_layers" in own:
            target_layers = int(own["target_layers"])
        else:
            raise StartupError(
                f"the head {files.path} does not say for which target it is: name the target's"
                " checkpoint with TANDEM_DRAFTER_TARGET"
            )
        self.reads = files.layers_of(target_layers)

    def _describe(self, vocab_size: int, hidden_size: int) -> None:
        """Tell what a family has found in its weights."""
        self.hidden_size = hidden_size
        self.about = replace(self.about, vocab_size=vocab_size, hidden_size=hidden_size)

    @property
    def dtype(self) -> str:
        """Dtype of weights and passes."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def remembers(self) -> bool:
        """Whether it has a KV cache, of all features that it was fed."""
        return self._pool is not None

    @property
    def pool(self) -> KVPool | None:
        """Of its decoder layer; None without one."""
        return self._pool

    def reserve(
        self, capacity: int, nodes: int = 0, held: int | None = None
    ) -> SequenceCache | None:
        """Room for a sequence; None if there is none now."""
        if self._pool is None:
            nowhere: Any = None
            return self.cache(nowhere, 0, capacity, weights=self._weights)
        part = self._pool.reserve(capacity, held)
        if part is None:
            return None
        return self.cache(
            part.pool, part.start, part.capacity, promised=part.promised, weights=self._weights
        )

    def release(self, cache: SequenceCache) -> None:
        """Give a sequence's room back."""
        if self._pool is not None:
            self._pool.release(cache)

    def _hold(self, room: Room, max_length: int) -> None:
        """Make the pool, for sequences of at most `max_length` positions. What a position takes is
        known when one was fed."""
        self.about = replace(self.about, max_length=max_length)
        self._pool = KVPool(1)
        cache = self.reserve(1)
        assert cache is not None
        with torch.inference_mode():
            self._rows([Feed(cache, [0], 1, features=self.no_features())])
        each = self._pool.bytes_per_position
        self._pool = self._pool.resized(cache_size(self.device, each, room))

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """The rows asked for, feed by feed."""
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        groups: dict[HeadWeights, list[int]] = {}
        for number, feed in enumerate(feeds):
            groups.setdefault(self._weights_of(feed), []).append(number)
        if len(groups) == 1:
            return PassOutput(self._rows(feeds))
        rows: dict[int, Tensor] = {}
        for own in groups.values():
            part = self._rows([feeds[number] for number in own])
            found = torch.split(part, [feeds[number].rows for number in own])
            rows.update(zip(own, found, strict=True))
        return PassOutput(torch.cat([rows[number] for number in range(len(feeds))]))

    @abstractmethod
    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        """[R, V] the rows asked for, feed by feed; of sequences of one version of the weights."""

    def _weights_of(self, feed: Feed) -> HeadWeights:
        """That a feed's sequence began with; the newest for a feed of no sequence."""
        own = feed.cache.weights if isinstance(feed.cache, HeadCache) else None
        return self._weights if own is None else own

    def _serve(self, weights: HeadWeights) -> None:
        """Give weights to new sequences."""
        self._weights = weights
        self._open.add(weights)

    def trained(self) -> HeadParameters:
        """A copy of the files' weights to train, float32, on the CPU: all but embedding and output
        matrix."""
        tensors = self._source.files.tensors()
        return HeadParameters({name: own for name, own in tensors.items() if self._learns(name)})

    @abstractmethod
    def _learns(self, name: str) -> bool:
        """Whether a tensor of the files is trained while the head serves."""

    @abstractmethod
    def _formed(self, tensors: Mapping[str, Tensor]) -> Any:
        """Trained tensors in the family's own form, see `HeadWeights`."""

    @abstractmethod
    def guesses(
        self, weights: HeadParameters, states: Tensor, paths: Tensor, piece: Tensor
    ) -> list[Tensor]:
        """What the output matrix reads, for each depth; differentiable in the weights.

        Args:
            weights: see `trained`.
            states: [n, layers, width] of the target.
            paths: [n, depths] int64, the tokens after each state, ids that the head has; a depth d
                reads the first d at most.
            piece: [n] int64, see `Pieces`: a decoder layer sees the states of the same piece.

        Returns:
            [n, width] for each depth from 1 on.
        """

    @abstractmethod
    def logits(self, read: Tensor, depth: int) -> Tensor:
        """[n, V] of what the output matrix of a depth, from 1 on, reads [n, width]."""

    @property
    def reads_last(self) -> bool:
        """Whether it reads the state after the final norm, and no others."""
        return not self._source.files.is_fused

    def with_learnt(self, learnt: LearntWeights) -> Callable[[], None]:
        """Read weights that were learnt. From any thread.

        Args:
            learnt: of a version; without a path those of the files.

        Returns:
            Gives them to new sequences; open ones keep theirs.

        Raises:
            OtherCheckpoint: they were learnt from another head.
            StartupError: they cannot be read.
            MemoryError: texts are open with two versions already, or there is no room.
        """
        if len(self._open) > _MOST_EARLIER:
            raise MemoryError("texts are open with two versions of the weights already")
        trained = self.trained()
        put_in(trained, self.about.weights_fingerprint, learnt)
        named = {name: each.detach() for name, each in trained.named_parameters()}
        with told_without_room():
            weights = HeadWeights(learnt.version, self._formed(self._source.placed(named)))

        def take() -> None:
            self._serve(weights)
            self.about = replace(self.about, weights_version=weights.version)

        return take

    def no_features(self) -> list[npt.NDArray[np.int16]]:
        """Features of one position that are 0."""
        return [np.zeros((1, len(self.reads), self.hidden_size), np.int16)]

    def measure(self, longest: int = 0) -> None:
        """Find out what passes over one new feature take, however long sequences may be."""
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


def ends_of(feeds: Sequence[Feed], device: torch.device) -> Tensor:
    """[B] the row of the last token of each feed."""
    counts = torch.tensor([len(feed.token_ids) for feed in feeds])
    return (counts.cumsum(0) - 1).to(device, non_blocking=True)


def features_of(feeds: Sequence[Feed], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, layers, width] the features of all feeds, feed by feed: of messages, or of the device."""
    parts = [part for feed in feeds for part in feed.features or ()]
    # An array over a message's bytes may not be written, so it is copied.
    tensors = [p if isinstance(p, Tensor) else torch.from_numpy(np.array(p)) for p in parts]
    # A copy to a device is not waited for; one to the host is read at once.
    waits = device.type == "cpu"
    if len({tensor.device for tensor in tensors}) > 1:  # a text whose drafter was lost
        tensors = [tensor.to(device, non_blocking=not waits) for tensor in tensors]
    states = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if states.dtype == torch.int16:
        states = states.view(torch.bfloat16)
    return states.to(device, non_blocking=not waits).to(dtype)
