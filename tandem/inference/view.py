"""A part of a decoder that serves, over the decoder's own weights and KV cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.viewed import ViewedCache
from tandem.inference.loading.partial import ModelPart, read_skipped
from tandem.inference.model import Model
from tandem.inference.output import PassOutput


class ModelView(Model):
    """Computes a part of a model that drafts for the whole (self-speculation).

    The first layers (LayerSkip, arXiv 2404.16710): their keys and values are what the whole would
    compute, so that it can go on behind them (`Resumed`). Or all but some sublayers (Draft &
    Verify, arXiv 2309.08168): the whole computes the drafted rows anew.

    Args:
        decoder: whose part it is, with a pass of the part.
        part: what is computed.
    """

    def __init__(self, decoder: Decoder, part: ModelPart) -> None:
        self._decoder, self.part = decoder, part
        self.device = decoder.device
        skipped = read_skipped(part.skip) if part.skip else None
        law = repr((decoder.about.fingerprint, "view", part.exit, skipped))
        fingerprint = hashlib.sha256(law.encode()).hexdigest()
        self.about = replace(decoder.about, fingerprint=fingerprint, of_layers=())

    @property
    def engine(self) -> str:
        """See `Model`."""
        return self._decoder.engine

    @property
    def dtype(self) -> str:
        """See `Model`."""
        return self._decoder.dtype

    @property
    def takes_trees(self) -> bool:
        """See `Model`."""
        return self._decoder.takes_trees

    @property
    def pool(self) -> Any:
        """None: it has no memory of its own."""
        return None

    def reserve(self, capacity: int, nodes: int = 0, held: int | None = None) -> ViewedCache:
        """A cache that shows its sequence's own one, once it is told which that is."""
        return ViewedCache()

    def release(self, cache: ViewedCache) -> None:
        """Nothing is held."""

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `Model`; what is behind an exit is noted in the feeds' caches."""
        output = self._decoder.forward_part(self.part, feeds)
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        return output

    def measure(self, longest: int) -> None:
        """See `Model`."""
        self.pass_times = self._decoder.times_of(self.part, longest)
