"""Decoders over models in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.description import describe
from tandem.inference.loading.checkpoint import LoadedCheckpoint
from tandem.inference.loading.extra_embeddings import add_embeddings


def decoder_over(
    model: PreTrainedModel, name: str, *, extra_embeddings: Tensor | None = None, **options: Any
) -> Decoder:
    """A decoder of a model without a tokenizer and hashes; the options are `DecoderOptions`'."""
    about = describe(model, name)
    if extra_embeddings is not None:
        add_embeddings(model, extra_embeddings)
        about = replace(about, probe_tokens=len(extra_embeddings))
    return Decoder(LoadedCheckpoint(model, about), DecoderOptions(**options))
