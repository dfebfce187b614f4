"""Ways to write a text, jobs, and measurements."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.tools.load.timeline import Timeline


@dataclass(frozen=True, order=True)
class Way:
    """An engine at a draft length.

    Attributes:
        engine: by name.
        gamma: draft length; 0 is without drafts.
        rule: which of the engine's ways to draft, if it has several.
    """

    engine: str
    gamma: int
    rule: str = ""

    @property
    def family(self) -> str:
        """The engine and its rule; each family has one best draft length."""
        return f"{self.engine} {self.rule}".strip()

    def __str__(self) -> str:
        return f"{self.family}, drafts of {self.gamma}" if self.gamma else f"{self.engine}, plain"


@dataclass(frozen=True, order=True)
class Job:
    """Texts to write at once.

    Attributes:
        temperature: of all texts.
        texts: number of texts.
        new_tokens: of each text.
    """

    temperature: float
    texts: int
    new_tokens: int

    def __str__(self) -> str:
        count = "one text" if self.texts == 1 else f"{self.texts} texts at once"
        return f"temperature {self.temperature:g}, {count} of {self.new_tokens} tokens"


@dataclass(frozen=True)
class Measurement:
    """Texts that were written.

    Attributes:
        turn: its number; prompts and seeds of a turn are the same for all ways.
        seconds: measured by the engine's own process.
        texts: token ids, cut to the requested length.
        surplus: tokens beyond that length, of all texts together; they are not counted.
        timelines: of each text, if the engine tells when its tokens arrived.
    """

    turn: int
    seconds: float
    texts: tuple[tuple[int, ...], ...]
    surplus: int = 0
    timelines: tuple[Timeline, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of all texts together."""
        return sum(map(len, self.texts)) / self.seconds
