"""A decoder that sees few keys of a text, to draft for itself that sees all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch

from tandem.errors import StartupError, first_line
from tandem.inference.choice.speed import profile_of
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import KVPool
from tandem.inference.kv.size import free_memory
from tandem.inference.kv.sparse import STRIDE, KeyChoice, SparseCache
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.kv.viewed import ViewedCache
from tandem.inference.output import PassOutput
from tandem.inference.passes.torch_llama import LlamaPass
from tandem.inference.views.of_decoder import OfDecoder
from tandem.speculation.tree import LONGEST_DRAFT

_log = structlog.get_logger(__name__)


def positions_of(keys: SparseKeys, longest: int) -> int:
    """That a sequence has in the pool of its keys: as many as are left until they are chosen again,
    and a draft with a guess after it.

    Args:
        keys: that are seen.
        longest: positions of a text.
    """
    return min(keys.budget + keys.chunk, longest) + STRIDE + 2 * LONGEST_DRAFT


class SparseView(OfDecoder):
    """All layers of a model, over few keys of each text (`SparseKeys`).

    It has the decoder's weights, and a pool of its own for the keys that it sees. They are chosen
    in a pass that sees all of them, of whichever row is due; that row is the decoder's own.

    Args:
        decoder: by torch; whose text it is.
        keys: that are seen.
        sequences: at a time.

    Raises:
        StartupError: the decoder's passes do not show their keys, or there is no room for those
            that are seen.
    """

    def __init__(self, decoder: Decoder, keys: SparseKeys, sequences: int) -> None:
        super().__init__(decoder, "sparse", keys)
        self._keys = keys
        self._each = positions_of(keys, decoder.about.max_length)
        self._masked = self.masked
        whole = decoder.backend
        if whole.engine != "torch":
            raise StartupError(
                f"{self.about.name}: few keys are seen by ENGINE=torch alone, and this model is"
                f" computed by {whole.engine}"
            )
        if not isinstance(whole.compute, LlamaPass) or not isinstance(whole.pool, KVPool):
            raise StartupError(
                f"{self.about.name}: few keys are seen in layers like Llama's alone, of the kinds"
                " llama, mistral, qwen2 and qwen3, without special features"
            )
        needed = sequences * self._each * whole.pool.bytes_per_position
        if needed > free_memory(self.device):
            raise StartupError(
                f"no memory for the keys that {sequences} sequences see, {self._each} positions"
                " each: lower kv's budget, or MAX_SEQUENCES"
            )
        try:
            self._backend = whole.beside(sequences * self._each)
        except (RuntimeError, MemoryError) as error:
            raise StartupError(
                f"cannot allocate the keys that {sequences} sequences see, {self._each} each:"
                f" {first_line(error)}"
            ) from error

    @property
    def takes_trees(self) -> bool:
        """Chains alone: what is after a text grows in a line."""
        return False

    def reserve(self, capacity: int, nodes: int = 0, held: int | None = None) -> SparseCache | None:
        """Room for a sequence's keys, however long it is; None if there is none now."""
        part = self._backend.pool.reserve(self._each)
        return None if part is None else SparseCache(part, self._keys)

    def release(self, cache: SparseCache) -> None:
        """See `Model`."""
        self._backend.pool.release(cache)

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `Model`; feeds whose keys are to be chosen go through the whole model."""
        due: list[int] = []
        others: list[int] = []
        for i, feed in enumerate(feeds):
            own: Any = feed.cache
            (due if own.due else others).append(i)
        rows: dict[int, torch.Tensor] = {}
        for chosen, forward in ((due, self._choose), (others, self._backend.forward)):
            if chosen:
                output = forward([feeds[i] for i in chosen])
                parts = torch.split(output.logits, [feeds[i].rows for i in chosen])
                rows.update(zip(chosen, parts, strict=True))
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        logits = torch.cat([rows[i] for i in range(len(feeds))])
        return PassOutput(logits).without(self._masked)

    def _choose(self, feeds: Sequence[Feed]) -> PassOutput:
        """Rows of the whole model; keys are chosen meanwhile."""
        shown, choices = [], []
        for feed in feeds:
            own: Any = feed.cache
            cache = ViewedCache()
            cache.show(own.of)
            choices.append(KeyChoice(own, len(feed.token_ids)))
            shown.append(replace(feed, cache=cache, choice=choices[-1]))
        output = self._decoder.forward(shown)
        for feed, choice in zip(feeds, choices, strict=True):
            own = feed.cache
            own.chosen(choice)
        return output

    def measure(self, longest: int) -> None:
        """See `Model`. Like all passes, they are measured after a short text."""
        try:
            with torch.inference_mode():
                self.pass_times = profile_of(self._backend, min(longest, self._each))
        except Exception as error:
            _log.warning("passes over few keys are not measured", reason=first_line(error))
