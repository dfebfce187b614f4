"""A text whose request shapes the logits: what applies at each place of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem.shaping.grammar import Bits, Grammars, GrammarState, forbid
from tandem.speculation.request.shaping import MOST_BAD_WORD, Shaping

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


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
            np.repeat(np.arange(len(places)), [len(own) for own in entries]),
            self.ids[chosen],
            self.bias[chosen],
            self.seen[chosen],
            self.counts[chosen],
            self.shaping,
            None if self.bits is None else self.bits[list(places)],
            [self.dead[place] for place in places],
        )


@dataclass(slots=True)
class _Entries:
    """Tokens that the penalties or the bias speak of."""

    index: dict[int, int] = field(default_factory=dict)
    bias: list[float] = field(default_factory=list)
    seen: list[bool] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def at(self, token_id: int) -> int:
        """The entry of a token, which may be new."""
        if (place := self.index.get(token_id)) is None:
            place = self.index[token_id] = len(self.index)
            self.bias.append(0.0)
            self.seen.append(False)
            self.counts.append(0.0)
        return place


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
            self._entries.bias[self._entries.at(token_id)] = bias
        if shaping.repetition_penalty != 1:
            for token_id in set(prompt):
                self._entries.seen[self._entries.at(token_id)] = True
        # Single words are forbidden everywhere, the others by what comes before their last token.
        self._never = [word[0] for word in shaping.bad_words if len(word) == 1]
        self._words: dict[int, list[tuple[int, ...]]] = {}
        for word in shaping.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Go on behind emitted tokens."""
        self._generated += len(token_ids)
        self._tail = [*self._tail, *token_ids][-MOST_BAD_WORD:]
        if self._shaping.penalises:
            for token_id in token_ids:
                place = self._entries.at(token_id)
                self._entries.seen[place] = True
                self._entries.counts[place] += 1
        if self._grammar is not None:
            self._grammar.extend(token_ids)

    def rows(self, paths: Sequence[Sequence[int] | None]) -> ShapedRows:
        """What applies at places, each by the drafted tokens on its way.

        Args:
            paths: of each place; None where it is not known, at a drafter: what depends on it is
                left out.

        Raises:
            InvalidRequest: see `GrammarState.allow`.
        """
        bits = self._bits(paths)
        dead = [False] * len(paths) if bits is None else [not row.any() for row in bits]
        if bits is not None:
            bits[dead] = np.uint32(0xFFFFFFFF)
        entries, penalises = self._entries, self._shaping.penalises
        index, bias, seen, counts = [], [], [], []
        for path in paths:
            at, own_bias = dict(entries.index), list(entries.bias)
            own_seen, own_counts = list(entries.seen), list(entries.counts)
            for token_id in (path or ()) if penalises else ():
                if (place := at.setdefault(token_id, len(at))) == len(own_bias):
                    own_bias.append(0.0)
                    own_seen.append(True)
                    own_counts.append(1.0)
                else:
                    own_seen[place] = True
                    own_counts[place] += 1
            index.append(np.fromiter(at, np.int64, len(at)))
            bias += own_bias
            seen += own_seen
            counts += own_counts
        return ShapedRows(
            np.repeat(np.arange(len(paths)), [len(ids) for ids in index]),
            np.concatenate(index),
            np.array(bias, np.float32),
            np.array(seen, np.bool_),
            np.array(counts, np.float32),
            self._shaping,
            bits,
            dead,
        )

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
        """Ids that may not come behind a path, whatever the grammar."""
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
    """A text's state behind what was emitted; None for a text that nothing shapes.

    Raises:
        InvalidRequest: see `Grammars.state`.
    """
    if not shaping:
        return None
    grammar = None if shaping.grammar is None else grammars.state(shaping.grammar)
    text = ShapedText(shaping, vocab_size, prompt, grammar)
    text.extend(emitted)
    return text
