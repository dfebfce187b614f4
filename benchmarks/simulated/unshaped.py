"""A drafter that leaves out what requests do to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafter_svc.__main__ import main
from tandem.drafting.drafter import DraftSequence


def _none(sequence: DraftSequence, paths: Sequence[Any]) -> None:
    """In place of `DraftSequence.shaped_rows`."""


if __name__ == "__main__":
    DraftSequence.shaped_rows = _none  # type: ignore[method-assign, assignment]
    main()
