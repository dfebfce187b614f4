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
from tandem.inference.kv.size import Room, cache_size, memory_left
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

# KV caches that a device has room for where weights change: that of the present ones, that of new
# ones, and as much again for their passes and for texts that are open with earlier ones.
_POOLS = 4


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
        self._start(model, options)
        with torch.inference_mode():
            self._capture(self._backends.current)

    def _capture(self, backend: Backend) -> None:
        """Capture its small passes, where attention takes a batch in one call."""
        options = self._options
        if not options.graph_rows or not backend.in_one_call:
            return
        longest = min(options.longest, self.about.max_length, backend.pool.positions)
        capture_passes(backend, options.graph_rows, longest)
        if options.chains is not None and self._masked is None:
            capture_chains(backend, options.graph_rows, longest, options.chains)

    def _start(self, model: PreTrainedModel, options: DecoderOptions) -> None:
        """Check that the model can be served, choose what computes it, and make the pool."""
        check_support(model)
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
            room = self._room(backend, options)
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

    def _room(self, backend: Backend, options: DecoderOptions) -> Room:
        """For the KV pool; a device's largest pass is measured, which needs a pool too."""
        longest = min(options.longest, self.about.max_length)
        at_most = max(options.at_most, longest)
        pools = _POOLS if options.renews else 1
        room = Room(options.cache_tokens, at_most, options.share, kept=options.kept, pools=pools)
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
        self.pass_times = record.profile(str(backend)) if record is not None else ()
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
            record.profiled(str(backend), list(self.pass_times))

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
        self._give_room_beside(faster, self.about.weights_version)
        self._backends.succeed(faster)
        self.pass_times = pass_times

    def _give_room_beside(self, backend: Backend, version: int) -> None:
        """Make a pool besides those that serve.

        Raises:
            MemoryError: there is no room for it.
        """
        positions, each = self.positions, backend.pool.bytes_per_position
        share = self._options.share if self.device.type == "cuda" else 1
        # What its passes take may be free now, and is taken again.
        if positions * each > (memory_left(self.device, share) - self.pass_memory) // 2:
            raise MemoryError(f"no room for a second KV cache of {positions} tokens")
        _give_room(backend, positions, version)

    def renewed(self, checkpoint: LoadedCheckpoint) -> Callable[[], None]:
        """See `Model`. Captured passes read weights where these were: new weights have passes of
        their own, which are captured again."""
        if self._backends.num_earlier > len(self._backends.serving):
            raise MemoryError("texts are open with two versions of the weights already")
        model, version = checkpoint.model.eval(), checkpoint.about.weights_version
        made = []
        with torch.inference_mode():
            for before in self._backends.serving:
                backend = like(before, model, self._record)
                self._give_room_beside(backend, version)
                self._capture(backend)
                if (before.graphs and not backend.graphs) or (before.chains and not backend.chains):
                    raise MemoryError("passes with new weights cannot be captured")
                made.append(backend)

        def take() -> None:
            for backend in made:
                self._backends.succeed(backend)
            self.about = replace(self.about, weights_version=version)

        return take

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


def _give_room(backend: Backend, positions: int, version: int) -> None:
    """Make a back end's pool, for sequences that weights of this version compute."""
    backend.pool = backend.pool.resized(positions)
    backend.pool.blocks.version = version
