"""Attention and the small kernels of a layer, each beside its operator's form for a CPU, and
mutants of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import FEW, Tiles, TileSizes
from tandem.inference.kv.branches import NO_BRANCHES
from tandem.kernels import attention, layer
from tests.unit.kernels.interpreter import Mutant, compared, in_the_other_order

CPU = torch.device("cpu")
# Slots that no text holds, around each text: more than a block of positions.
_APART = 20
# Positions of a block, for several in a short text, whatever is best on a GPU.
_BLOCK = 16


@dataclass(frozen=True)
class Text:
    """Rows of one text.

    Attributes:
        before: slots of the trunk before its rows.
        rows: fed now.
        old: parents of branch rows that were fed before.
        new: parents of branch rows that are fed now, the last of `rows`.
    """

    before: int
    rows: int
    old: Sequence[int] = ()
    new: Sequence[int] = ()

    def segment(self, first: int, start: int) -> Segment:
        parents = (*self.old, *self.new)
        branches = NO_BRANCHES.grown(parents) if parents else None
        length = self.before + self.rows + len(self.old)
        return Segment(first, self.rows, start, length, branches)


@dataclass(frozen=True)
class Attention:
    """Attention of a batch.

    Attributes:
        heads: query heads, key heads, numbers of a key, numbers of a value.
        texts: of the batch.
        window: positions that a row sees.
        softcap: of the scores.
        programs: that keep a device busy: with more than there are otherwise, positions are split.
        room: to which the batch is padded.
        again: whether it is called once more on the same counters, its programs in the other order.
    """

    heads: tuple[int, int, int, int]
    texts: Sequence[Text]
    window: int | None = None
    softcap: float = 0.0
    programs: int = 1
    room: TileSizes | None = None
    again: bool = False

    def faults(self) -> list[str]:
        torch.manual_seed(1)
        segments, first, start = [], 0, _APART
        for text in self.texts:
            segments.append(text.segment(first, start))
            first += text.rows
            start += segments[-1].length + _APART
        queries, count, width, value_width = self.heads
        rows = first if self.room is None else self.room.rows
        query = torch.full((rows, queries, width), torch.nan).transpose(0, 1)
        query[:, :first] = torch.randn(queries, first, width)
        keys, values = (torch.full((count, start, w), torch.nan) for w in (width, value_width))
        for one in segments:
            own = slice(one.start, one.start + one.length)
            keys[:, own] = torch.randn(count, one.length, width)
            values[:, own] = torch.randn(count, one.length, value_width)
        tiles = Tiles(segments, CPU, self.room, (self.window,))
        seen = tiles.seen(self.window)
        rest: tuple[Any, ...] = *seen, tiles.counts, tiles.size, tiles.words, 0.4, self.softcap
        states = query.double(), keys.double(), values.double()
        expected = attention._by_operators(*states, *rest)[:first].float()
        attention._PROGRAMS = self.programs
        attention._blocks = lambda *_: (_BLOCK, 1)
        found = attention._by_triton(query, keys, values, *rest)[:first]
        faults = [*compared("attention", expected, found)]
        if tiles.counts.any():
            faults.append("counts are not zero")
        if self.again:
            with in_the_other_order():
                again = attention._by_triton(query, keys, values, *rest)[:first]
            if not torch.equal(found, again):
                faults.append("a second call differs")
        return faults


@dataclass(frozen=True)
class Turned:
    """Heads that are turned and written.

    Attributes:
        heads: query heads, key heads, numbers of each.
        normed: whether queries and keys have a norm.
    """

    heads: tuple[int, int, int]
    normed: bool

    def faults(self) -> list[str]:
        torch.manual_seed(2)
        queries, count, width = self.heads
        slots = torch.tensor([3, 9, 1])
        heads = torch.randn(len(slots), queries + 2 * count, width)
        turns = torch.polar(torch.ones(3, 1, width // 2), torch.randn(3, 1, width // 2))
        gain = torch.rand(queries + count, width) if self.normed else None
        found = []
        for compute in (layer._turn_by_operators, layer._turn_by_triton):
            keys, values = torch.zeros(count, 12, width), torch.zeros(count, 12, width)
            pairs = torch.view_as_real(turns)
            query = compute(heads, pairs, slots, keys, values, queries, gain, 1e-2)
            found.append((query, keys, values))
        names = "queries", "keys", "values"
        return [
            fault
            for name, *both in zip(names, *found, strict=True)
            for fault in compared(name, *both)
        ]


@dataclass(frozen=True)
class Gated:
    """The gate of an MLP of a width."""

    width: int

    def faults(self) -> list[str]:
        torch.manual_seed(3)
        rows = torch.randn(2, 2 * self.width)
        return [
            *compared("gate", layer._gate_by_operators(rows.double()), layer._gate_by_triton(rows))
        ]


# A chain of 40 with a side branch after every third row: more rows than a word has bits.
_LONG_TREE = [max(0, i - 1 - i % 3) for i in range(40)]
_SPLIT = Text(90, 3, new=(0, 0)), Text(20, 2), Text(40, 2, old=(0, 0, 1), new=(2, 3))

CASES: dict[str, Attention | Turned | Gated] = {
    "single rows": Attention((4, 1, 16, 16), (Text(20, 1), Text(0, 1))),
    "a value's width is another": Attention((2, 2, 8, 4), (Text(5, 5), Text(31, 2))),
    "seven heads of a group": Attention((7, 1, 24, 24), (Text(9, 3),)),
    "several groups": Attention((4, 2, 8, 8), (Text(3, 2),)),
    "a chunk of a prompt": Attention((1, 1, 16, 16), (Text(30, 66),)),
    "a chunk of grouped heads": Attention((4, 1, 8, 8), (Text(0, 17),)),
    "window": Attention((1, 1, 16, 16), (Text(40, 5), Text(2, 4)), window=7),
    "soft cap": Attention((1, 1, 8, 8), (Text(6, 2),), softcap=0.5),
    "a tree after new rows": Attention((4, 2, 16, 8), (Text(20, 5, new=(0, 0, 1)), Text(8, 3))),
    "a tree that grows": Attention((4, 1, 8, 8), (Text(33, 3, old=(0, 0, 1), new=(1, 3, 0)),)),
    "a tree in a window": Attention(
        (1, 1, 16, 16), (Text(40, 4, new=(0, 1, 0)), Text(9, 2, old=(0,), new=(0, 1))), window=4
    ),
    "a tree of two words": Attention((1, 1, 16, 16), (Text(7, 42, new=_LONG_TREE),)),
    "splits": Attention((4, 2, 8, 8), _SPLIT, programs=4 * 3 * 2),
    "splits of one text": Attention(
        (2, 2, 8, 8), (Text(40, 3, new=(0, 0)),), programs=2 * 2, again=True
    ),
    "no splits": Attention((2, 1, 8, 8), _SPLIT),
    "splits of a window": Attention((2, 1, 8, 8), (Text(110, 4),), window=50, programs=4),
    "padded": Attention(
        (4, 1, 8, 8),
        (Text(5, 2), Text(40, 3, new=(0, 0))),
        programs=2 * 4 * 4,
        room=TileSizes(rows=8, tiles=4, size=FEW, words=2),
        again=True,
    ),
    "turned": Turned((4, 2, 8), normed=False),
    "turned, of a width that is no power of two": Turned((2, 1, 24), normed=False),
    "turned and normed": Turned((2, 1, 16), normed=True),
    "turned and normed, of a width that is no power of two": Turned((2, 1, 24), normed=True),
    "gate": Gated(1500),
}


def _attention(right: str, wrong: str, case: str) -> Mutant:
    return Mutant("triton_attention", right, wrong, case)


def _layer(right: str, wrong: str, case: str) -> Mutant:
    return Mutant("triton_layer", right, wrong, case)


_TREE, _WORDS, _SPLITS = "a tree that grows", "a tree of two words", "splits of one text"
_NORMED = "turned and normed, of a width that is no power of two"


MUTANTS = {
    "bits of a tree ignored": _attention(
        "sees = sees | (((word >> (off & 31)[None, :].to(tl.int64)) & 1) > 0)", "pass", _TREE
    ),
    "the first word alone": _attention("(off >> 5)[None, :]", "(off * 0)[None, :]", _WORDS),
    "words of another row": _attention("(row * words)[:, None]", "row[:, None]", _WORDS),
    "the next bit": _attention("(off & 31)[None, :]", "((off + 1) % 32)[None, :]", _TREE),
    "rows of the trunk alone": _attention("if start + N > base:", "if start > base:", _TREE),
    "a split dropped": _attention("for i in range(used):", "for i in range(used - 1):", _SPLITS),
    "splits merged without their weights": _attention("+ piece * add[:, None]", "+ piece", _SPLITS),
    "sums merged without their weights": _attention(
        "total = total * keep + total_i * add", "total = total + total_i", _SPLITS
    ),
    "splits that overlap": _attention(
        "end = tl.minimum(begin + each * N, high)", "end = high", _SPLITS
    ),
    "the last split merges before others end": _attention(
        "if ended == used - 1:", "if split == used - 1:", _SPLITS
    ),
    "a counter that stays": _attention("tl.store(counts + part * H + head, 0)", "pass", _SPLITS),
    "counters of other heads": _attention(
        "ended = tl.atomic_add(counts + part * H + head,",
        "ended = tl.atomic_add(counts + part,",
        _SPLITS,
    ),
    "the first slot left out": _attention(
        "p[None, :] >= first[:, None]", "p[None, :] > first[:, None]", "window"
    ),
    "a slot before the window": _attention(
        "p[None, :] >= first[:, None]", "p[None, :] >= first[:, None] - 1", "window"
    ),
    "the last slot left out": _attention(
        "p[None, :] <= last[:, None]", "p[None, :] < last[:, None]", "single rows"
    ),
    "a slot after the last": _attention(
        "p[None, :] <= last[:, None]", "p[None, :] <= last[:, None] + 1", "window"
    ),
    "another group's queries": _attention(
        "(head * G + group) * query_head", "(group * H + head) * query_head", "several groups"
    ),
    "written to another group": _attention(
        "(row * H + head) * G + group", "(row * G + group) * H + head", "several groups"
    ),
    "values read after the end": _attention(
        "mask=there[:, None] & (dv < DV)[None, :]",
        "mask=(p >= 0)[:, None] & (dv < DV)[None, :]",
        "single rows",
    ),
    "older weights not scaled": _attention(
        "acc = acc * keep[:, None] + tl.dot", "acc = acc + tl.dot", "a chunk of a prompt"
    ),
    "no scale": _attention(
        'input_precision="ieee") * scale', 'input_precision="ieee")', "soft cap"
    ),
    "no soft cap": _attention("if CAP:", "if CAP and N == 0:", "soft cap"),
    "turned the other way": _layer(
        "even * cos - odd * sin, even * sin + odd * cos",
        "even * cos + odd * sin, odd * cos - even * sin",
        "turned",
    ),
    "a sign": _layer("even * cos - odd * sin", "even * cos + odd * sin", "turned"),
    "values turned": _layer(
        "if head < HQ + H:\n        if", "if head < D * HQ:\n        if", "turned"
    ),
    "keys of another head": _layer(
        "keys + (head - HQ).to(tl.int64)", "keys + (HQ + H - 1 - head).to(tl.int64)", "turned"
    ),
    "no norm": _layer("if NORM:", "if NORM and D == 0:", _NORMED),
    "a norm of the padded width": _layer("/ D + eps", "/ WIDE + eps", _NORMED),
    "no eps": _layer("/ D + eps", "/ D", _NORMED),
    "one head's norm for all": _layer("gain + head * D + 2 * half,", "gain + 2 * half,", _NORMED),
    "silu of the other half": _layer("tl.sigmoid(first)", "tl.sigmoid(second)", "gate"),
    "no silu": _layer("first * tl.sigmoid(first) * second", "first * second", "gate"),
}
