"""One round's drafted tokens with the exact distributions they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of drafted tokens; the rows are concatenated, as on the wire.

    Attributes:
        token_ids: [G] int64.
        support_sizes: [G] int64, entries of each row; 0 for a one-hot row.
        support_ids: [sum of sizes] uint32.
        weights: [sum of sizes] uint16.
    """

    token_ids: npt.NDArray[np.int64]
    support_sizes: npt.NDArray[np.int64]
    support_ids: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.uint16]

    @classmethod
    def none(cls) -> Draft:
        """The empty draft, of plain decoding."""
        return cls.from_rows(*(np.empty(shape, np.int64) for shape in (0, (0, 0), (0, 0))))

    @classmethod
    def from_rows(
        cls,
        token_ids: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        weights: npt.NDArray[np.int64],
    ) -> Draft:
        """Concatenate rows. One with a single token is one-hot and costs nothing.

        Args:
            token_ids: [G], drawn from the rows.
            ids: [G, K] token ids of the rows.
            weights: [G, K], 0 for padding.
        """
        sent = weights > 0
        sizes = sent.sum(1)
        sent[sizes == 1] = False
        return cls(
            token_ids,
            np.where(sizes == 1, 0, sizes),
            ids[sent].astype(np.uint32),
            weights[sent].astype(np.uint16),
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self, vocab_size: int, max_gamma: int) -> None:
        """Check a draft before trusting it.

        Raises:
            ValueError: what is wrong, beginning with the field's name.
        """
        gamma = len(self.token_ids)
        if gamma > max_gamma:
            raise ValueError(f"draft.token_ids holds {gamma} tokens, the limit is {max_gamma}")
        if len(self.support_sizes) != gamma:
            raise ValueError(
                f"draft.support_sizes holds {len(self.support_sizes)} entries for {gamma} tokens"
            )
        entries = int(self.support_sizes.sum())
        if len(self.support_ids) != entries:
            raise ValueError(
                f"draft.support_ids holds {len(self.support_ids)} ids, support_sizes say {entries}"
            )
        if len(self.weights) != entries:
            raise ValueError(
                f"draft.weights holds {len(self.weights)} weights, support_sizes say {entries}"
            )
        largest = max(self.token_ids.max(initial=0), self.support_ids.max(initial=0))
        if largest >= vocab_size:
            raise ValueError(
                f"draft holds token id {largest}, the target's vocabulary has {vocab_size}"
            )
        if entries and not self.weights.all():
            raise ValueError("draft.weights holds a weight of 0; leave such tokens out")
        self._check_rows()

    def _check_rows(self) -> None:
        if not len(self.support_ids):
            return
        rows = np.repeat(np.arange(len(self)), self.support_sizes)
        keys = np.sort(rows << 32 | self.support_ids.astype(np.int64))
        if (keys[1:] == keys[:-1]).any():
            raise ValueError("draft.support_ids holds a token id twice in one row")
        sparse = np.flatnonzero(self.support_sizes)
        wanted = sparse << 32 | self.token_ids[sparse]
        inside = keys.take(np.searchsorted(keys, wanted), mode="clip") == wanted
        if not inside.all():
            row = int(sparse[~inside][0])
            raise ValueError(
                f"draft.token_ids[{row}] = {self.token_ids[row]} is outside its row's support"
            )
