"""A decoder that computes tokens in flight, each by its next group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.flight import Flight
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.output import PassOutput
from tandem.inference.passes.overlapped import ONE_PIPELINE, OverlappedPass, Pipelines
from tandem.inference.passes.torch_llama import LlamaPass

# Tokens of a text that is compared, and how far apart rows may be, as a share of their largest
# number. A wrong row is about as far as that.
_LENGTH = 12
_TOLERANCE = {"float32": 1e-3}
_ROUGH = 0.1


class OverlappedDecoder:
    """Scores a decoder's own sequences, over its weights and its KV cache.

    Args:
        decoder: by torch.
        exit_: layers after which the next token is guessed; 0 for the cycles of a model that uses
            its layers several times.
        guesses: of a token, at a time.
        pipelines: run the groups.

    Attributes:
        vocab_size: columns of its logits.
        groups: that a token goes through.
        exit: groups after which the next token is guessed.

    Raises:
        StartupError: its layers cannot be told apart so, or give other rows.
    """

    chains = False

    def __init__(
        self,
        decoder: Decoder,
        exit_: int,
        guesses: int = 1,
        pipelines: Pipelines = ONE_PIPELINE,
    ) -> None:
        self._decoder, self.vocab_size = decoder, decoder.vocab_size
        self._masked = decoder.masked
        name, backend = decoder.about.name, decoder.backend
        compute = backend.compute
        if backend.engine != "torch":
            raise StartupError(
                f"{name} is computed by {backend.engine}, which computes whole passes"
                " alone; set ENGINE=torch"
            )
        if not isinstance(compute, LlamaPass):
            raise StartupError(
                f"{name} has no layers like Llama's, of the kinds llama, mistral, qwen2"
                " and qwen3, without special features; no others can be told apart"
            )
        layers = len(compute.blocks)
        if exit_ >= layers:
            raise StartupError(
                f"{name} has {layers} layers, and some have to be left behind the exit"
            )
        if not exit_ and compute.cycles == 1:
            raise StartupError(
                f"{name} uses each of its {layers} layers once; give the number of an exit's layers"
            )
        if guesses > 1 and not backend.takes_trees:
            raise StartupError(f"{name} takes no branches here, and so one guess at a time alone")
        self._pass = OverlappedPass(backend, compute, exit_, pipelines)
        self.groups, self.exit = self._pass.groups, self._pass.exit
        self._check(guesses)

    @torch.inference_mode()
    def _check(self, guesses: int) -> None:
        """Compare the rows of a short text with those of whole passes.

        Raises:
            StartupError: they differ by more than rounding.
        """
        decoder, length = self._decoder, min(_LENGTH, self._decoder.about.max_length)
        text = [(7 * i + 1) % self.vocab_size for i in range(length)]
        cache = decoder.reserve(length + guesses + self.groups)
        if cache is None or length < _LENGTH:
            return  # nothing of that length is served
        try:
            whole = decoder.forward([Feed(cache, text, length)]).logits[:-1].float()
            cache.rollback(0)
            rows = torch.stack(self._rows_of(text, cache, guesses))
        finally:
            decoder.release(cache)
        known = whole.isfinite()  # ids that are never drawn are not
        differs = float((rows - whole)[known].abs().max() / whole[known].abs().max())
        if not differs <= _TOLERANCE.get(decoder.dtype, _ROUGH):
            raise StartupError(
                f"the rows of {decoder.about.name} by groups of layers differ by {differs:.2g} of"
                f" their size from those of whole passes, in {decoder.dtype}"
            )

    def _rows_of(self, text: Sequence[int], cache: SequenceCache, guesses: int) -> list[Tensor]:
        """The rows of all tokens but the last, of which every second is guessed wrong first."""
        rows: list[Tensor] = []
        flight: Flight | None = None
        for place, token_id in enumerate(text[:-1]):
            flight = flight or Flight.of(token_id)
            while True:
                feed = flight.feed(cache, self.exit)
                logits = self.forward([feed]).logits
                if flight.tokens[0].through == self.groups:
                    break
                if flight.tokens[-1].through >= self.exit:
                    right = text[min(place + len(flight.tokens), len(text) - 1)]
                    others = [(right + n) % self.vocab_size for n in range(1, guesses + 1)]
                    flight.guess([*others[1:], others[0] if place % 2 else right])
            rows.append(logits[0].float())
            kept = flight.go_on(cache, text[place + 1])
            flight = flight if kept else None
        return rows

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `Scorer`; each feed's tokens are in flight."""
        output = self._pass.forward(feeds)
        self._decoder.forward_passes += 1
        self._decoder.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        return output.without(self._masked)

    def draw_on(self, feeds: Sequence[Feed], asked: Any) -> None:
        """See `Scorer`."""
        return None
