"""What a trainer is told to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Of a drafter to its trainer.

    Attributes:
        model: directory or hub id of the checkpoint; of a head its folder.
        head: family of the head; empty for a decoder.
        target: checkpoint that the head is for; empty where its files say all that is needed.
        adapter: see `CheckpointSource`.
        exit: see `ModelPart`.
        skip: see `ModelPart`.
        weights: file of those that are served; empty for the checkpoint's.
        folder: of the state.
        home: file of home texts; empty has the drafter, or a head's target, write some.
        seconds: of a core, that may be spent in a minute.
        most_bytes: of the replay.
        most_seconds: age of a text.
        seed: of the batches.
    """

    model: str
    head: str = ""
    target: str = ""
    adapter: str = ""
    exit: int = 0
    skip: str = ""
    weights: str = ""
    folder: str
    home: str = ""
    seconds: float
    most_bytes: int
    most_seconds: float
    seed: int = 0
