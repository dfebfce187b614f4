"""Which text is in which row, where vLLM tells no requests."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem.speculation.request.sampling import Sampling
from tandem_vllm.drafting import DraftAsk
from tandem_vllm.text import Opening

# Last tokens of a text by which it is known again. Two texts that are taken for each other have
# worse drafts, and the same law.
_LAST = 256
# Passes after which a text that was in none of them has ended, or begins again when it comes back.
_MOST_MISSED = 16
# Where no rule knows the distribution, the likeliest token is kept more often than a drawn one.
_LIKELIEST = Sampling(temperature=0.0)

_Key = tuple[int, int]


@dataclass
class MatchedRows:
    """The rows of a pass.

    Attributes:
        asks: by row, of texts that are known.
        openings: texts that are new.
        ended: names of texts that are over.
    """

    asks: dict[int, DraftAsk] = field(default_factory=dict)
    openings: list[Opening] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


class TextsOfRows:
    """Knows texts again by what they were after the last pass.

    Args:
        gamma: the longest draft.
        max_length: tokens of the longest text.
    """

    def __init__(self, gamma: int, max_length: int) -> None:
        self._gamma = gamma
        self._max_length = max_length
        # Several texts may be the same so far; any of their sequences does for each.
        self._names: dict[_Key, list[str]] = defaultdict(list)
        self._seen: dict[str, tuple[int, _Key]] = {}
        self._passes = self._begun = 0

    def match(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        lengths: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
    ) -> MatchedRows:
        """Find the texts of a pass.

        Args:
            sampled_token_ids: of each row, by the pass; none in the middle of a prompt.
            lengths: [rows], of the texts after the pass.
            token_ids: [rows, longest], the texts.
        """
        self._passes += 1
        found = MatchedRows()
        for row, new in enumerate(sampled_token_ids):
            length, text = int(lengths[row]), token_ids[row]
            room = self._max_length - length
            if not new or room < 1:
                continue
            names = self._names.get(_key(text, length - len(new)))
            if names:
                name = names.pop()
                found.asks[row] = DraftAsk(name, list(new), min(self._gamma, room))
            else:
                self._begun += 1
                name = f"row-{self._begun}"
                found.openings.append(Opening(name, text[:length].tolist(), _LIKELIEST, room))
            self._seen[name] = self._passes, _key(text, length)
        found.ended = [
            name for name, (seen, _) in self._seen.items() if self._passes - seen > _MOST_MISSED
        ]
        for name in found.ended:
            del self._seen[name]
        self._names = defaultdict(list)
        for name, (_, key) in self._seen.items():
            self._names[key].append(name)
        return found


def _key(text: npt.NDArray[np.int32], length: int) -> _Key:
    return length, zlib.crc32(text[max(length - _LAST, 0) : length].tobytes())
