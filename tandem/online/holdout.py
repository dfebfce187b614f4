"""Which texts are measured on, and never learnt from. Without torch."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

# First tokens of a text by which it is held out or not, and by how many more each time that too
# many texts share them; and the most in all.
_LEAST, _STEP, _MOST = 64, 16, 4096
# A beginning says nothing of a text if more texts than a chat has turns, and more than this share
# of all, have it.
_TURNS, _SHARE = 16, 1 / 32
# Beginnings that are counted; the oldest are forgotten.
_COUNTED = 1 << 16


class Holdout:
    """One text of eight, by a hash of its first tokens: later turns of a chat are on the side of
    the first one. Where many texts begin alike, as after a system prompt, more tokens are read."""

    def __init__(self) -> None:
        self._texts = 0
        self._begun: OrderedDict[bytes, int] = OrderedDict()

    def takes(self, token_ids: npt.NDArray[np.uint32]) -> bool:
        """Whether a text is held out. Each text is asked for once, when it is kept.

        Args:
            token_ids: [n] of all of it.
        """
        self._texts += 1
        most = max(_TURNS, self._texts * _SHARE)
        hashed = blake2b(token_ids[:_LEAST].tobytes(), digest_size=8)
        found, crowded = hashed.digest(), self._count(hashed.digest()) > most
        # All beginnings are counted: else each further step would take as many texts to one side.
        for end in range(_LEAST, min(len(token_ids), _MOST), _STEP):
            hashed.update(token_ids[end : end + _STEP].tobytes())
            count = self._count(hashed.digest())
            if crowded:
                found, crowded = hashed.digest(), count > most
        return found[0] % 8 == 0

    def _count(self, beginning: bytes) -> int:
        """How many texts have begun so."""
        found = self._begun.pop(beginning, 0) + 1
        self._begun[beginning] = found
        if len(self._begun) > _COUNTED:
            self._begun.popitem(last=False)
        return found
