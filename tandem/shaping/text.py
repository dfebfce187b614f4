"""A text whose request shapes the logits: what applies at each place of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.shaping.grammar import Bits, Grammars, GrammarState, forbid
from tandem.speculation.request.shaping import MOST_BAD_WORD, Shaping

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
# Entries at first.
_ROOM = 64


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """What applies at some places of one text. An entry is a token at a place.

    Attributes:
        rows: [N] the place of each entry.
        ids: [N] its token.
        bias: [N] that is added to its logit.
        seen: [N] whether the prompt or the text up to the place has it.
        counts: [N] how often it was generated up to there.
        shaping: the penalties for them.
        bits: [R, W] tokens that may come at each place; None where all may.
        dead: of each place, whether no token may come: its bits are all set, and the text ends if
            it comes so far.
    """

    rows: Ints
    ids: Ints
    bias: Floats
    seen: npt.NDArray[np.bool_]
    counts: Floats
    shaping: Shaping
    bits: Bits | None
    dead: Sequence[bool]

    def __len__(self) -> int:
        """Places."""
        return len(self.dead)

    def at(self, places: Sequence[int]) -> ShapedRows:
        """What applies at some of the places, in their order."""
        entries = [np.flatnonzero(self.rows == place) for place in places]
        chosen = np.concatenate(entries) if entries else np.zeros(0, np.int64)
        return ShapedRows(
            rows=np.repeat(np.arange(len(places)), [len(own) for own in entries]),
            ids=self.ids[chosen],
            bias=self.bias[chosen],
            seen=self.seen[chosen],
            counts=self.counts[chosen],
            shaping=self.shaping,
            bits=None if self.bits is None else self.bits[list(places)],
            dead=[self.dead[place] for place in places],
        )


class _Entries:
    """Tokens that the penalties or the bias speak of.

    Attributes:
        index: the place of each token's entry.
    """

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self._ids, self._bias = np.zeros(_ROOM, np.int64), np.zeros(_ROOM, np.float32)
        self._seen, self._counts = np.zeros(_ROOM, np.bool_), np.zeros(_ROOM, np.float32)

    def at(self, token_id: int) -> int:
        """The entry of a token, which may be new."""
        if (place := self.index.get(token_id)) is None:
            place = self.index[token_id] = len(self.index)
            if place == len(self._ids):
                self._ids, self._bias, self._seen, self._counts = (
                    np.concatenate([column, np.zeros_like(column)])
                    for column in (self._ids, self._bias, self._seen, self._counts)
                )
            self._ids[place] = token_id
        return place

    def add_bias(self, token_id: int, bias: float) -> None:
        """Have a bias for a token."""
        place = self.at(token_id)  # before its column is read, which a new entry may replace
        self._bias[place] = bias

    def see(self, token_id: int, count: int = 0) -> None:
        """Count a token: it is there, and was generated a number of times more."""
        place = self.at(token_id)
        self._seen[place] = True
        self._counts[place] += count

    def behind(
        self, paths: Sequence[Sequence[int]]
    ) -> tuple[Ints, Ints, Floats, npt.NDArray[np.bool_], Floats]:
        """Rows, ids, bias, seen and counts of all entries after each path, which leave no trace.
        New tokens of a path have an entry in its row alone."""
        size = len(self.index)
        rows = np.repeat(np.arange(len(paths)), size)
        ids = np.tile(self._ids[:size], len(paths))
        bias = np.tile(self._bias[:size], len(paths))
        seen = np.tile(self._seen[:size], len(paths))
        counts = np.tile(self._counts[:size], len(paths))
        new: list[tuple[int, int, int]] = []  # row, token, count
        for row, path in enumerate(paths):
            for token_id in dict.fromkeys(path):
                count, place = list(path).count(token_id), self.index.get(token_id)
                if place is None:
                    new.append((row, token_id, count))
                else:
                    seen[row * size + place] = True
                    counts[row * size + place] += count
        if new:
            more = np.array(new, np.int64)
            rows, ids = np.append(rows, more[:, 0]), np.append(ids, more[:, 1])
            bias = np.append(bias, np.zeros(len(new), np.float32))
            seen = np.append(seen, np.ones(len(new), np.bool_))
            counts = np.append(counts, more[:, 2].astype(np.float32))
        return rows, ids, bias, seen, counts


class ShapedText:
    """The state of a text, as far as its shaping reads it. It moves on with emitted tokens alone,
    so that a draft, whatever becomes of it, leaves no trace.

    Args:
        shaping: of the request.
        vocab_size: ids that have a bit.
        prompt: its ids.
        grammar: the state at the prompt's end; None for none.
    """

    def __init__(
        self,
        shaping: Shaping,
        vocab_size: int,
        prompt: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self._shaping, self._grammar = shaping, grammar
        self._vocab_size = vocab_size
        self._generated = 0
        self._tail = list(prompt[-MOST_BAD_WORD:])
        self._entries = _Entries()
        for token_id, bias in shaping.logit_bias:
            self._entries.add_bias(token_id, bias)
        if shaping.repetition_penalty != 1:
            for token_id in set(prompt):
                self._entries.see(token_id)
        # Single words are forbidden everywhere, the others by what comes before their last token.
        self._never = [word[0] for word in shaping.bad_words if len(word) == 1]
        self._words: dict[int, list[tuple[int, ...]]] = {}
        for word in shaping.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Go on after emitted tokens."""
        self._generated += len(token_ids)
        self._tail = [*self._tail, *token_ids][-MOST_BAD_WORD:]
        if self._shaping.penalises:
            for token_id in token_ids:
                self._entries.see(token_id, 1)
        if self._grammar is not None:
            self._grammar.extend(token_ids)

    def rows(self, paths: Sequence[Sequence[int] | None]) -> ShapedRows:
        """What applies at places, each by the drafted tokens on its way.

        Args:
            paths: of each place; None where it is not known, at a drafter: what depends on it is
                left out.
        """
        bits = self._bits(paths)
        dead = [False] * len(paths) if bits is None else [not row.any() for row in bits]
        if bits is not None:
            bits[dead] = np.uint32(0xFFFFFFFF)
        penalises = self._shaping.penalises
        own = [(path or ()) if penalises else () for path in paths]
        return ShapedRows(*self._entries.behind(own), self._shaping, bits, dead)

    def _bits(self, paths: Sequence[Sequence[int] | None]) -> Bits | None:
        """[R, W] tokens that may come at each place; None where all may."""
        forbidden = [self._forbidden(path or ()) for path in paths]
        if self._grammar is None and not any(forbidden):
            return None
        everything = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        everything[: self._vocab_size] = 1
        known = np.packbits(everything, bitorder="little").view(np.uint32)
        bits = np.tile(known, (len(paths), 1))
        for row, path, never in zip(bits, paths, forbidden, strict=True):
            if self._grammar is not None and path is not None:
                self._grammar.allow(path, row)
                row &= known
            forbid(row, never)
        return bits

    def _forbidden(self, path: Sequence[int]) -> list[int]:
        """Ids that may not come after a path, whatever the grammar."""
        found = list(self._never)
        if self._generated + len(path) < self._shaping.min_tokens:
            found += self._shaping.end_token_ids
        if self._words:
            tail = (*self._tail, *path)[-MOST_BAD_WORD:]
            for word in self._words.get(tail[-1], ()):
                if tail[1 - len(word) :] == word[:-1]:
                    found.append(word[-1])
        return [token_id for token_id in found if token_id < self._vocab_size]


def shaped_text(
    shaping: Shaping,
    vocab_size: int,
    prompt: Sequence[int],
    emitted: Sequence[int],
    grammars: Grammars,
) -> ShapedText | None:
    """A text's state after what was emitted; None for a text that nothing shapes.

    Raises:
        InvalidRequest: see `Grammars.state`.
    """
    if not shaping:
        return None
    grammar = None if shaping.grammar is None else grammars.state(shaping.grammar)
    text = ShapedText(shaping, vocab_size, prompt, grammar)
    text.extend(emitted)
    return text
