"""A drafter whose distributions are shifted to other tokens for as long as a file exists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drafter_svc.__main__ import main
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.output import PassOutput

SHUFFLED = "SHUFFLED_WHILE"


def _shuffle() -> None:
    own, flag = Decoder.forward, Path(os.environ[SHUFFLED])

    def forward(self: Decoder, feeds: Sequence[Feed]) -> PassOutput:
        output = own(self, feeds)
        return replace(output, logits=output.logits.roll(7, -1)) if flag.exists() else output

    Decoder.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    _shuffle()
    main()
