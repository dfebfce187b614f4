"""A part of a decoder that serves, over the decoder's own weights and KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from tandem.errors import first_line
from tandem.inference.choice.speed import PROFILED_POSITIONS, profile_of
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.viewed import ViewedCache
from tandem.inference.loading.partial import ModelPart, read_skipped
from tandem.inference.output import PassOutput
from tandem.inference.views.of_decoder import OfDecoder

_log = structlog.get_logger(__name__)


class ModelView(OfDecoder):
    """Computes a part of a model that drafts for the whole (self-speculation).

    The first layers (LayerSkip, arXiv 2404.16710): their keys and values are what the whole would
    compute, so that it can go on after them (`Resumed`). Or all but some sublayers (Draft &
    Verify, arXiv 2309.08168): the whole computes the drafted rows again.

    Args:
        decoder: whose part it is, with a pass of the part.
        part: what is computed.
    """

    def __init__(self, decoder: Decoder, part: ModelPart) -> None:
        skipped = read_skipped(part.skip) if part.skip else None
        super().__init__(decoder, "view", part.exit, skipped)
        self.part = part
        self._longest, self._measured = 0, decoder.backend

    @property
    def takes_trees(self) -> bool:
        """See `Model`."""
        return self._decoder.takes_trees

    def reserve(self, capacity: int, nodes: int = 0, held: int | None = None) -> ViewedCache:
        """A cache that shows its sequence's own one, once it is told which that is."""
        return ViewedCache()

    def release(self, cache: ViewedCache) -> None:
        """Nothing is held."""

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `Model`; what is after an exit is noted in the feeds' caches.

        Raises:
            ValueError: a feed would write over the text that the whole computed.
        """
        for feed in feeds:
            if isinstance(feed.cache, ViewedCache) and feed.cache.length < feed.cache.of.length:
                raise ValueError("a part of a model is fed after its text alone")
        output = self._decoder.forward_part(self.part, feeds)
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        return output

    def measure(self, longest: int) -> None:
        """See `Model`; in a pool of its own, so that it may be done again."""
        self._longest, self._measured = longest, self._decoder.backend
        try:
            own = self._measured.beside(PROFILED_POSITIONS, self.part)
            with torch.inference_mode():
                self.pass_times = profile_of(own, min(longest, self.about.max_length))
        except Exception as error:
            _log.warning("a part's passes are not measured", reason=first_line(error))
            self.pass_times = ()

    def improve(self) -> None:
        """Measure again, where another back end serves than was measured."""
        if self._measured is not self._decoder.backend:
            self.measure(self._longest)
