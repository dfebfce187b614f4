"""What all views have: a decoder's weights, and no memory that bounds a text."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from tandem.inference.decoder import Decoder
from tandem.inference.model import Model


class OfDecoder(Model):
    """A model with the weights of a decoder, another law, and no hidden states.

    Args:
        decoder: whose weights they are.
        law: what its rows hang on besides.
    """

    def __init__(self, decoder: Decoder, *law: object) -> None:
        self._decoder, self.device = decoder, decoder.device
        told = repr((decoder.about.fingerprint, *law))
        fingerprint = hashlib.sha256(told.encode()).hexdigest()
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
    def pool(self) -> Any:
        """None: what it holds does not bound a text's length."""
        return None
