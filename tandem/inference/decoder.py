"""A decoder-only transformer, loaded once, that takes ragged batches of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.errors import StartupError, first_line
from tandem.inference.choice.choose import EngineName, choose_backend, like
from tandem.inference.choice.speed import PROMPT_ROWS, is_whole, profile_of
from tandem.inference.compatibility import check_support
from tandem.inference.feed import Feed
from tandem.inference.hidden_states import NONE, layers_from
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.size import Room, cache_size, gib, memory_left, told_without_room
from tandem.inference.loading.checkpoint import LoadedCheckpoint
from tandem.inference.loading.partial import ModelPart
from tandem.inference.model import Model
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import Backend
from tandem.inference.passes.backends import Backends
from tandem.inference.passes.chains import Cut
from tandem.inference.passes.cuda_graphs import capture_chains, capture_passes
from tandem.inference.passes.largest import NOT_MEASURED, LargestPass, memory_of_passes
from tandem.inference.threads import use_threads
from tandem.profile import PassTime

_log = structlog.get_logger(__name__)

# KV caches that there is to be room for where weights change: of the present version, of the next
# one, and on a device of two earlier ones that texts may be open with. Those of a CPU take memory
# as they are used.
_POOLS = {"cuda": 4, "cpu": 2}


@dataclass(frozen=True)
class DecoderOptions:
    """How a decoder computes, and how much it holds of its sequences.

    Attributes:
        cache_tokens: positions that all sequences may hold together; 0 takes `at_most`, or more for
            one of the longest sequence, as far as that fits, see `cache_size`.
        at_most: see `cache_tokens`.
        share: of the device's memory, see `Room`.
        largest: pass, which is measured on a CUDA device before the KV pool is made.
        passes: bytes of the device that passes of another model of this process may take instead.
        kept: see `Room`.
        renews: whether its weights change while it serves: each version has a KV cache.
        threads: of this process, from the settings; None leaves them unchanged.
        engine: what computes the pass; see `choose_backend`.
        drafts: whether the model drafts, in any dtype that is faster.
        trees: whether sequences may have branches; if the fastest back end cannot take them, a
            second one stands by for them.
        graph_rows: new tokens of the largest pass to capture as a CUDA graph, if attention takes a
            batch in one call; 0 captures none.
        chains: how distributions are cut that a drafter's chains are drawn from, whose passes are
            then captured with their draws; None captures none.
        longest: length of the longest sequence, in positions; for the graphs.
        states_of: layers whose hidden states passes can give, see `layers_from`.
        views: parts that compute over the same weights and KV cache.
    """

    cache_tokens: int = 0
    at_most: int = 4096
    share: float = 1.0
    largest: LargestPass = NOT_MEASURED
    passes: int = 0
    kept: int = 0
    renews: bool = False
    threads: int | None = None
    engine: EngineName = "torch"
    drafts: bool = False
    trees: bool = False
    graph_rows: int = 0
    chains: Cut | None = None
    longest: int = 0
    states_of: str = NONE
    views: tuple[ModelPart, ...] = ()


class Decoder(Model):
    """A causal language model with its KV pool, by whichever back end is the fastest.

    Args:
        checkpoint: the decoder takes over its weights.
        options: how it computes.

    Raises:
        StartupError: the model cannot be served, or is too large, in one sentence.
    """

    def __init__(self, checkpoint: LoadedCheckpoint, options: DecoderOptions) -> None:
        model, about = checkpoint.model.eval(), checkpoint.about
        if options.threads is not None:  # before the layout is chosen
            use_threads(options.threads, about.parameters)
        self.device = next(model.parameters()).device
        self.about = replace(about, of_layers=layers_from(options.states_of, model))
        self._masked = self.masked
        # Bytes of a device that passes take beside weights and pools; 0 where it is not measured.
        self.pass_memory = options.passes
        self._options = options
        self._weight_bytes = sum(each.nbytes for each in model.parameters())
        self._start(model)
        with torch.inference_mode():
            of_passes, of_chains = self._capture(self._backends.current)
        if of_passes:
            said = "passes are launched operator by operator, not as CUDA graphs"
            _log.warning(said, reason=of_passes)
        if of_chains:
            _log.warning("each token of a draft takes a pass of its own", reason=of_chains)

    def _capture(self, backend: Backend) -> tuple[str, str]:
        """Capture its small passes and its chains, where attention takes a batch in one call; why
        either fails, empty where it does not."""
        options = self._options
        if not options.graph_rows or not backend.in_one_call:
            return "", ""
        longest = min(options.longest, self.about.max_length, backend.pool.positions)
        of_passes = capture_passes(backend, options.graph_rows, longest)
        if options.chains is None or self._masked is not None:
            return of_passes, ""
        return of_passes, capture_chains(backend, options.graph_rows, longest, options.chains)

    def _start(self, model: PreTrainedModel) -> None:
        """Check that the model can be served, choose what computes it, and make the pool."""
        check_support(model)
        options = self._options
        with torch.inference_mode():
            choice = choose_backend(
                model,
                options.engine,
                options.drafts,
                options.trees,
                self.about.of_layers,
                options.views,
            )
            backend = choice.backend
            room = self._room(backend)
            positions = cache_size(self.device, backend.pool.bytes_per_position, room)
            try:
                for each in filter(None, (backend, choice.for_trees)):
                    _give_room(each, positions, self.about.weights_version)
            except (RuntimeError, MemoryError) as error:
                raise StartupError(
                    f"cannot allocate a KV cache of {positions} tokens: {first_line(error)}"
                ) from error
        self._backends = Backends(backend, choice.for_trees, options.trees)
        self._trial = choice.trial
        self._record = choice.record
        self.improving = choice.trial is not None

    def _room(self, backend: Backend) -> Room:
        """For the KV pool; a device's largest pass is measured, which needs a pool too."""
        options = self._options
        longest = min(options.longest, self.about.max_length)
        at_most = max(options.at_most, longest)
        room = Room(options.cache_tokens, at_most, options.share, kept=options.kept)
        if options.renews:
            later = self._weight_bytes if self.device.type == "cuda" else 0
            room = room._replace(pools=_POOLS[self.device.type], weights=later)
        if self.device.type != "cuda" or not options.largest.rows:
            return room
        captured = options.graph_rows if backend.in_one_call else 0
        largest = options.largest._replace(captured=captured)
        longest = min(longest, options.cache_tokens or longest)
        taken = memory_of_passes(backend, largest, longest, room.share)
        self.pass_memory = max(taken, options.passes)
        return room._replace(passes=self.pass_memory)

    def measure(self, longest: int) -> None:
        """See `Model`: takes a second, or remembers it from an earlier start."""
        backend, record = self._backends.current, self._record
        self.pass_times = record.profile(backend.form) if record is not None else ()
        if self.pass_times:
            return
        try:
            with torch.inference_mode():
                at_most = min(longest, self.about.max_length)
                # A row of a prompt costs a device far less than one more of a few.
                prompts = PROMPT_ROWS if self.device.type == "cuda" else ()
                self.pass_times = profile_of(backend, at_most, prompts)
        except Exception as error:
            _log.warning("passes are not measured", reason=first_line(error))
            return
        times = {f"{count}x{rows}": round(ns / 1e6, 2) for count, rows, ns in self.pass_times}
        _log.info("passes in ms, by sequences and rows of each", **times)
        # A start beside others, or with a small cache, is measured again.
        if record is not None and is_whole(self.pass_times):
            record.profiled(backend.form, list(self.pass_times))

    def improve(self) -> None:
        """Find the fastest back end for the model; new sequences use it from then on.

        Takes seconds, in parallel to serving. Call it once, from any thread.
        """
        trial, self._trial = self._trial, None
        if trial is None:
            return
        try:
            with torch.inference_mode():
                found = trial.run(self._backends.current)
                if found is not None:
                    self._succeed(*found)
        except Exception as error:  # the present back end goes on serving
            _log.warning(
                "no faster pass can be had",
                reason=f"{type(error).__name__}: {first_line(error)}",
            )
        self.improving = False

    def _succeed(self, faster: Backend, pass_times: Sequence[PassTime]) -> None:
        """Give new sequences to a faster back end.

        Raises:
            MemoryError: there is no room for its KV pool besides the present one.
        """
        self._require_room([faster], instead=True)
        _give_room(faster, self.positions, self.about.weights_version)
        self._backends.succeed(faster)
        self.pass_times = pass_times

    def _require_room(
        self, backends: Sequence[Backend], weights: int = 0, instead: bool = False
    ) -> None:
        """Refuse pools besides those that serve where they have no room.

        Args:
            backends: of the keys that the pools are to hold.
            weights: bytes of weights that are not loaded yet.
            instead: whether they take the place of pools that texts have hardly begun to use.

        Raises:
            MemoryError: there is none, with the numbers.
        """
        pools = sum(self.positions * each.pool.bytes_per_position for each in backends)
        device = self.device.type == "cuda"
        left = memory_left(self.device, self._options.share if device else 1)
        # What a device's passes take may be free now, and is taken again. Half of a CPU's memory is
        # for other programs; a pool takes it as it is used.
        needed = weights + self.pass_memory + pools * (1 if device or instead else 2)
        if needed > left:
            beside = f" and {gib(weights)} of weights" if weights else ""
            raise MemoryError(
                f"no room for a second KV cache of {self.positions} tokens{beside}:"
                f" {self.device} needs {gib(needed)}, and {gib(left)} are left"
            )

    def renewed(self, read: Callable[[], LoadedCheckpoint]) -> Callable[[], None]:
        """See `Model`. Captured passes read weights where these were: new weights have passes of
        their own, which are captured again."""
        if self._backends.num_earlier > len(self._backends.serving):
            raise MemoryError("texts are open with two versions of the weights already")
        with told_without_room():
            self._require_room(self._backends.serving, self._weight_bytes)
            checkpoint = read()
            model, version = checkpoint.model.eval(), checkpoint.about.weights_version
            with torch.inference_mode():
                made = [self._like(before, model, version) for before in self._backends.serving]

        def take() -> None:
            for backend in made:
                self._backends.succeed(backend)
            self.about = replace(self.about, weights_version=version)

        return take

    def _like(self, before: Backend, model: PreTrainedModel, version: int) -> Backend:
        """A back end of the same kind for other weights, with a pool of its own.

        Raises:
            MemoryError: fewer of its passes can be captured.
        """
        backend = like(before, model, self._record)
        _give_room(backend, self.positions, version)
        reasons = self._capture(backend)
        captured = zip(_captured(backend), _captured(before), strict=True)
        if any(own < known for own, known in captured):
            why = "; ".join(filter(None, reasons)) or "there is no room for all sizes"
            raise MemoryError(f"passes with new weights cannot be captured: {why}")
        return backend

    @property
    def engine(self) -> str:
        """What computes the pass of new sequences: "torch" or "openvino"."""
        return self._backends.current.engine

    @property
    def dtype(self) -> str:
        """Dtype of weights and passes."""
        return str(self._backends.current.dtype).removeprefix("torch.")

    @property
    def pool(self) -> Any:
        """The KV pool of new sequences, in the back end's own form."""
        return self._backends.current.pool

    @property
    def takes_trees(self) -> bool:
        """Whether new sequences may have branches. A warning at the start names a model that takes
        none. Without `trees`, this may become False when the back end changes."""
        return self._backends.takes_trees

    def reserve(
        self, capacity: int, nodes: int = 0, held: int | None = None
    ) -> SequenceCache | None:
        """Room for a sequence, see `Model`."""
        return self._backends.reserve(capacity, nodes, held)

    def release(self, cache: SequenceCache) -> None:
        """Free a sequence's room, see `Model`."""
        self._backends.release(cache)

    def forget_prefixes(self) -> int:
        """See `Model`."""
        return self._backends.forget_prefixes()

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """Feed new tokens of several sequences in one pass, see `Model`."""
        output = self._backends.forward(feeds)
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        return output.without(self._masked)

    @property
    def backend(self) -> Backend:
        """That of new sequences."""
        return self._backends.current

    def forward_part(self, part: ModelPart, feeds: Sequence[Feed]) -> PassOutput:
        """Feed new tokens to a part that it was made with, see `Backends.forward`."""
        return self._backends.forward(feeds, part).without(self._masked)

    @property
    def chains(self) -> bool:
        """See `Model`."""
        return self._backends.current.chains is not None

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        """Draw chains without the host between their tokens, see `Model`."""
        drawn = self._backends.draw_on(feeds, asked)
        if drawn is not None:
            self.forward_passes += len(drawn)
            self.fed_tokens += len(drawn) * len(feeds)
        return drawn


def _captured(backend: Backend) -> tuple[int, int]:
    """How many sizes of passes are captured, and of chains."""
    return len(list(backend.graphs or ())), len(list(backend.chains or ()))


def _give_room(backend: Backend, positions: int, version: int) -> None:
    """Make a back end's pool, for sequences that weights of this version compute."""
    backend.pool = backend.pool.resized(positions)
    backend.pool.blocks.version = version
