"""What is told of each token: its log probability, and whatever else comes of its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# As vLLM's: a reply with this number of likeliest tokens is 20 times as large.
MOST_TOP = 20
# A message to a client has a message for each token, and one for each of the likeliest.
_VALUE_BYTES, _ID_BYTES = 16, 8


@dataclass(frozen=True, slots=True)
class LogProbsWanted:
    """What a text tells of each of its tokens.

    Attributes:
        top: number of likeliest tokens at each place to tell of too; at most 20.
        processed: of the distribution that tokens are drawn from; else of the model's own, before
            shaping, temperature and truncation.
        prompt: of the prompt's tokens too, but for the first.

    Raises:
        ValueError: `top` is out of range.
    """

    top: int = 0
    processed: bool = False
    prompt: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.top <= MOST_TOP:
            raise ValueError(f"top must be 0..{MOST_TOP}, got {self.top}")

    @property
    def bytes_each(self) -> int:
        """Of a message, the most that those of a token take."""
        return _VALUE_BYTES + self.top * (_VALUE_BYTES + _ID_BYTES)


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """What is told of a token.

    Attributes:
        value: natural logarithm of its probability; float32.
        top: the likeliest tokens at its place with theirs, the likeliest first.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


class LogProbsGiven(NamedTuple):
    """What a target tells of tokens, by the names of the fields of `ModelInfo` that say so."""

    tells_log_probs: bool = True


def misfit(wanted: LogProbsWanted, given: LogProbsGiven) -> str:
    """Why a target cannot tell what is wanted, as a sentence for a client; empty where it can."""
    return "" if given.tells_log_probs else "log_probs: the target is of a version without them"
