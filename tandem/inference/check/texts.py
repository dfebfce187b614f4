"""The tokens that are fed to a model to try it, and to time it."""

from __future__ import annotations

import random
from dataclasses import dataclass

# A vocabulary that is not longer than this is used whole.
_FEW = 16
# Tokens that both texts begin with.
TRUNK = 5


def ordinary_tokens(vocab_size: int, count: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids from the lower middle of a vocabulary, the same at each start.

    Special tokens, single bytes and padding are at the ends of a vocabulary. A trained model
    computes them with several times the rounding errors of ordinary tokens.

    Args:
        vocab_size: ids that the model has.
        count: of tokens.
        seed: another one gives other tokens.
    """
    end = max(vocab_size // 2, min(vocab_size, _FEW))
    numbers = random.Random(seed)
    return tuple(numbers.randrange(vocab_size // 16, end) for _ in range(count))


@dataclass(frozen=True, slots=True)
class ProbeTexts:
    """Two texts that begin alike and differ at each later place.

    Attributes:
        first: is fed in pieces.
        second: as long; its tokens are also the wrong drafts and the siblings of the first's.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]

    @classmethod
    def of(cls, vocab_size: int, length: int) -> ProbeTexts:
        """Texts of ordinary tokens.

        Args:
            vocab_size: at least two.
            length: of each, in tokens.
        """
        first, other = (ordinary_tokens(vocab_size, length, seed) for seed in (0, 1))
        differing = [
            theirs if theirs != ours else (theirs + 1) % vocab_size
            for ours, theirs in zip(first, other, strict=True)
        ]
        return cls(first, (*first[:TRUNK], *differing[TRUNK:]))
