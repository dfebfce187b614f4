"""A decoder that computes tokens in flight, each by its next group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.output import PassOutput
from tandem.inference.passes.overlapped import ONE_PIPELINE, OverlappedPass, Pipelines
from tandem.inference.passes.torch_llama import LlamaPass


class OverlappedDecoder:
    """Scores a decoder's own sequences, over its weights and its KV cache.

    Args:
        decoder: by torch.
        exit_: layers behind which the next token is guessed; 0 for the cycles of a model that uses
            its layers several times.
        pipelines: run the groups.

    Attributes:
        vocab_size: columns of its logits.
        groups: that a token goes through.
        exit: groups behind which the next token is guessed.

    Raises:
        StartupError: its layers cannot be told apart so.
    """

    chains = False

    def __init__(self, decoder: Decoder, exit_: int, pipelines: Pipelines = ONE_PIPELINE) -> None:
        self._decoder, self.vocab_size = decoder, decoder.vocab_size
        self._masked = decoder.masked
        name, backend = decoder.about.name, decoder.backend
        compute = backend.compute
        if backend.engine != "torch":
            raise StartupError(
                f"OVERLAP: {name} is computed by {backend.engine}, which computes whole passes"
                " alone; set ENGINE=torch"
            )
        if not isinstance(compute, LlamaPass):
            raise StartupError(
                f"OVERLAP: {name} has no layers like Llama's, of the kinds llama, mistral, qwen2"
                " and qwen3, without special features; no others can be told apart"
            )
        layers = len(compute.blocks)
        if exit_ >= layers:
            raise StartupError(
                f"OVERLAP={exit_}: {name} has {layers} layers, and some have to be left behind the"
                " exit"
            )
        if not exit_ and compute.cycles == 1:
            raise StartupError(
                f"OVERLAP=cycles: {name} uses each of its {layers} layers once; name the layers of"
                " an exit"
            )
        self._pass = OverlappedPass(backend, compute, exit_, pipelines)
        self.groups, self.exit = self._pass.groups, self._pass.exit

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `Scorer`; each feed's tokens are in flight."""
        output = self._pass.forward(feeds)
        self._decoder.forward_passes += 1
        self._decoder.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        return output.without(self._masked)

    def draw_on(self, feeds: Sequence[Feed], asked: Any) -> None:
        """See `Scorer`."""
        return None
