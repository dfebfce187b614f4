"""Kernels in Triton's interpreter beside their operators' form for a CPU, and mutants of them.

The interpreter replaces the compiler if `TRITON_INTERPRET` is set before Triton is imported: so
`test_interpreted.py` runs this file once, in a process of its own, and reads what it prints.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.inference import kernels
from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import FEW, Tiles, TileSizes
from tandem.inference.kernels import attention, draws, layer, verdicts
from tandem.inference.kv.branches import NO_BRANCHES
from tandem.speculation.categorical import Categorical
from tandem.speculation.request.sampling import Sampling
from tests.support.devices.drafted import CHAIN, KINDS, Kind, drafted, drawn_from

CPU = torch.device("cpu")
# In float32, of numbers of about 1.
CLOSE = 1e-5
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


@dataclass(frozen=True)
class Drawn:
    """Draws from rows, one of each sampling.

    Attributes:
        samplings: of the rows.
        size: of the vocabulary.
        steps: of a logit, in which there are none between: with few, many are equal.
        siblings: draws of a row.
        taken: tokens without which it is drawn.
        support: the most tokens of a row.
        mass: the share of it that is kept.
        spread: of the logits.
        dtype: of the logits.
    """

    samplings: Sequence[Sampling]
    size: int = 150
    steps: float = 1e6
    siblings: int = 1
    taken: Sequence[int] = ()
    support: int = 16
    mass: float = 1.0
    spread: float = 3.0
    dtype: torch.dtype = torch.float32

    def faults(self) -> Iterator[str]:
        torch.manual_seed(4)
        draws._LANES, draws._WIDE, draws._BLOCK = 32, 16, 64
        count = len(self.samplings)
        logits = (self.spread * torch.randn(count + 1, self.size) * self.steps).round() / self.steps
        logits[1:, 3] = -torch.inf
        asked = drawn_from(range(count, 0, -1), self.size, self.samplings, self.siblings)
        asked[0, draws.SIZE] -= self.size // 4
        taken = torch.tensor([self.taken] * count, dtype=torch.int64).view(count, -1)
        rest = asked, taken, self.mass, self.support, self.siblings
        logits = logits.to(self.dtype)
        expected = draws._draw_by_operators(logits, *rest)
        found = draws._draw_by_triton(logits, *rest)
        tokens, rows = draws.parts_of(found, self.siblings)
        wanted, theirs = draws.parts_of(expected, self.siblings)
        if not torch.equal(tokens, wanted):
            yield f"other tokens: {tokens.tolist()}, not {wanted.tolist()}"
        for ours, other in zip(_entries(rows), _entries(theirs), strict=True):
            if [token for token, _ in ours] != [token for token, _ in other]:
                yield f"other ids: {ours}, not {other}"
            elif any(abs(a - b) > 1 for (_, a), (_, b) in zip(ours, other, strict=True)):
                yield f"other weights: {ours}, not {other}"


def _entries(rows: Categorical) -> Iterator[list[tuple[int, int]]]:
    """Of each row the tokens that have a weight, in order."""
    for ids, weights in zip(rows.ids.tolist(), rows.weights.tolist(), strict=True):
        yield [(token, weight) for token, weight in zip(ids, weights, strict=True) if weight]


@dataclass(frozen=True)
class Decided:
    """Verdicts of drafts of each kind.

    Attributes:
        rule: that decides.
        samplings: of the texts.
        kinds: of the drafts.
        seeds: of batches.
    """

    rule: str
    samplings: Sequence[Sampling] = (Sampling(),)
    kinds: Sequence[Kind] = tuple(KINDS)
    seeds: Sequence[int] = (1,)

    def faults(self) -> Iterator[str]:
        draws._LANES, draws._WIDE, draws._BLOCK, verdicts._LANES = 32, 16, 64, 16
        for seed in self.seeds:
            given = drafted(self.kinds, 40, 16, seed, self.samplings)
            laws = draws._laws_by_triton(given.logits, given.places)
            rest = laws, given.places, given.asked, given.rows, self.rule == "block"
            expected = verdicts._decide_by_operators(given.logits, *rest)
            found = verdicts._decide_by_triton(given.logits, *rest)
            for text, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                if not torch.equal(ours[:2], theirs[:2]):
                    yield f"text {text}: {ours[:2].tolist()}, not {theirs[:2].tolist()}"
            yield from compared("overlaps", expected[:, 3:].float(), found[:, 3:].float())
            if not found.isfinite().all():
                yield "a verdict that is not finite"


def compared(name: str, expected: Tensor, found: Tensor) -> Iterator[str]:
    """A fault unless two tensors are the same but for rounding, NaN being never the same."""
    apart = float((expected - found).abs().max())
    if not apart < CLOSE:
        yield f"{name} off by {apart:.2g}"


@contextmanager
def in_the_other_order() -> Iterator[None]:
    """Run the programs of a launch from the last to the first, as a device may."""
    from triton.runtime.interpreter import interpreter_builder as builder

    ordinary = builder.set_grid_idx

    def backwards(*at: int) -> None:
        ordinary(*(most - 1 - i for most, i in zip(builder.grid_dim, at, strict=True)))

    builder.set_grid_idx = backwards
    try:
        yield
    finally:
        builder.set_grid_idx = ordinary


# A chain of 40 with a side branch behind every third row: more rows than a word has bits.
_LONG_TREE = [max(0, i - 1 - i % 3) for i in range(40)]
_SPLIT = Text(90, 3, new=(0, 0)), Text(20, 2), Text(40, 2, old=(0, 0, 1), new=(2, 3))

_CUTS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.7, top_k=40, top_p=0.9),
    Sampling(min_p=0.1),
    Sampling(temperature=0),
    Sampling(top_p=0.5, min_p=0.05),
]
CASES: dict[str, Attention | Turned | Gated | Drawn | Decided] = {
    "single rows": Attention((4, 1, 16, 16), (Text(20, 1), Text(0, 1))),
    "a value's width is another": Attention((2, 2, 8, 4), (Text(5, 5), Text(31, 2))),
    "seven heads of a group": Attention((7, 1, 24, 24), (Text(9, 3),)),
    "several groups": Attention((4, 2, 8, 8), (Text(3, 2),)),
    "a chunk of a prompt": Attention((1, 1, 16, 16), (Text(30, 66),)),
    "a chunk of grouped heads": Attention((4, 1, 8, 8), (Text(0, 17),)),
    "window": Attention((1, 1, 16, 16), (Text(40, 5), Text(2, 4)), window=7),
    "soft cap": Attention((1, 1, 8, 8), (Text(6, 2),), softcap=0.5),
    "a tree behind new rows": Attention((4, 2, 16, 8), (Text(20, 5, new=(0, 0, 1)), Text(8, 3))),
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
    "draws": Drawn(_CUTS, size=90, mass=0.95),
    "draws of bfloat16": Drawn(_CUTS[:4], dtype=torch.bfloat16),
    "likeliest": Drawn([Sampling(top_k=5), Sampling(temperature=0)]),
    "min-p": Drawn([Sampling(min_p=0.01)], mass=0.8),
    "equal logits": Drawn(
        [Sampling(top_p=0.8), Sampling(top_k=3)], steps=1.0, mass=0.9, dtype=torch.bfloat16
    ),
    "one value": Drawn([Sampling(top_p=0.5), Sampling()], spread=0.0, support=99),
    "flat rows": Drawn(
        [Sampling(top_p=0.9), Sampling(top_k=60, top_p=0.5)], spread=0.05, support=40
    ),
    "siblings": Drawn([Sampling(temperature=0.7)], siblings=3, taken=(63, -1), steps=2.0),
    "few tokens": Drawn(_CUTS[:2], size=5),
    "block": Decided("block"),
    "token": Decided("token"),
    "verdicts of cut rows": Decided("block", _CUTS[1:], (CHAIN, Kind(()), CHAIN)),
    "a chain": Decided("block", kinds=(CHAIN,), seeds=(10, 15)),
    "a broken chain": Decided(
        "block", kinds=(Kind((0, 1, 2), on_device=True, broken=True),), seeds=(2,)
    ),
    "a tree": Decided("block", kinds=(Kind((0, 0, 1, 1, 2)),), seeds=(8,)),
    "judged siblings": Decided("token", kinds=(Kind((0, 0, 0, 0)),), seeds=(15,)),
    "a tree, token": Decided("token", kinds=(Kind((0, 0, 1, 1, 2)),)),
}


@dataclass(frozen=True)
class Mutant:
    """A fault of a kernel.

    Attributes:
        file: of the kernel, a module of `kernels`.
        right: what stands there, once.
        wrong: in its place.
        case: that sees it.
    """

    file: str
    right: str
    wrong: str
    case: str


def _attention(right: str, wrong: str, case: str) -> Mutant:
    return Mutant("triton_attention", right, wrong, case)


def _layer(right: str, wrong: str, case: str) -> Mutant:
    return Mutant("triton_layer", right, wrong, case)


_TREE, _WORDS, _SPLITS = "a tree that grows", "a tree of two words", "splits of one text"
_NORMED = "turned and normed, of a width that is no power of two"


def _draws(right: str, wrong: str, case: str) -> Mutant:
    return Mutant("triton_draws", right, wrong, case)


def _verdicts(right: str, wrong: str, case: str = "a chain") -> Mutant:
    return Mutant("triton_verdicts", right, wrong, case)


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
    "a slot behind the last": _attention(
        "p[None, :] <= last[:, None]", "p[None, :] <= last[:, None] + 1", "window"
    ),
    "another group's queries": _attention(
        "(head * G + group) * query_head", "(group * H + head) * query_head", "several groups"
    ),
    "written to another group": _attention(
        "(row * H + head) * G + group", "(row * G + group) * H + head", "several groups"
    ),
    "values read behind the end": _attention(
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
    "a threshold off by one": _draws(
        "enough = tl.sum(above, 0) >= wanted", "enough = tl.sum(above, 0) > wanted", "likeliest"
    ),
    "equal ones by their arrival": _draws(
        "others[None, :] > mine[:, None]",
        "(others >> 32)[None, :] > (mine >> 32)[:, None]",
        "equal logits",
    ),
    "one more of equal ones": _draws(
        "enough = tl.sum(before, 0) >= wanted", "enough = tl.sum(before, 0) > wanted", "one value"
    ),
    "all equal ones kept": _draws("tl.where(keep < equal, keep, 0.0)", "0.0 * keep", "one value"),
    "a mass of all equal ones": _draws(
        "before + keep * each", "before + equal * each", "equal logits"
    ),
    "a list longer than its room": _draws("(count <= room)", "(count <= 2 * room)", "one value"),
    "no min-p": _draws("kept & (mass >= least)", "kept", "min-p"),
    "all of top-k's mass": _draws(
        "mass = _above(among, many, cut, largest, scale, True, SHIFT, LANES)",
        "pass",
        "flat rows",
    ),
    "no temperature": _draws("_LOG2_E / warmth", "_LOG2_E / 1.0", "siblings"),
    "ids of another vocabulary": _draws(
        "size = tl.load(own + SIZE).to(tl.int32)",
        "size = tl.load(asked + asked_width + SIZE).to(tl.int32)",
        "few tokens",
    ),
    "a share that is not cut": _draws("(before < mass)", "(before < 2 * mass)", "min-p"),
    "a number used again": _draws("DIGITS + 2 * i + 1)", "DIGITS + 1)", "siblings"),
    "a sibling left in": _draws("tl.where(distinct, found, -1)", "-1", "siblings"),
    "an earlier token left in": _draws(
        "left = tl.where(token == gone, 0, left)", "pass", "siblings"
    ),
    "a residual without the joint": _verdicts("part * left - q", "left - q"),
    "others without the joint": _verdicts("+ part * share * others", "+ share * others"),
    "a chance that stays": _verdicts("mass / rejected)", "part)", "a tree"),
    "a judged sibling left in": _verdicts(
        "weights = tl.where(own & (distinct > 0), 0, weights)", "pass", "judged siblings"
    ),
    "a node without what leads to it": _verdicts("part * ratio, 1.0", "ratio, 1.0"),
    "a chance before its children": _verdicts(
        "after = tl.where(k == place - 1, chance, after)", "pass", "a tree"
    ),
    "parents before their children": _verdicts(
        "when = tl.min(tl.where(passed, order, _NEVER), 0)",
        "when = tl.max(tl.where(passed, order, -1), 0)",
    ),
    "a row without weight": _verdicts("count = one\n", "pass\n", "a broken chain"),
    "overlaps with the row alone": _verdicts("tl.minimum(p, full)", "full"),
    "what is left of others as they were": _verdicts("left, share * p)", "left, p)"),
    "a node's number for what follows": _verdicts("UNIFORMS + most) *", "UNIFORMS) *"),
    "the last part drawn from": _verdicts("part = tl.minimum(hit, last)", "part = last"),
    "children of the root alone": _verdicts(
        "tl.where(passed & (parents == place), k, K)", "K + 0 * k", "a tree, token"
    ),
}


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """With a copy of the kernel's file, changed, in its place."""
    name = f"{kernels.__name__}.{mutant.file}"
    right = importlib.import_module(name)
    source = Path(str(right.__file__)).read_text()
    assert source.count(mutant.right) == 1, f"{mutant.right!r} is not there, or not once"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{mutant.file}.py")
        path.write_text(source.replace(mutant.right, mutant.wrong))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        wrong = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(wrong)
        setattr(kernels, mutant.file, wrong)
        try:
            yield
        finally:
            setattr(kernels, mutant.file, right)


def tried(faults: Callable[[], Iterable[str]]) -> list[str]:
    """Faults that are found, or the error that ended the search."""
    try:
        return list(faults())
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def main() -> None:
    """Print a JSON of the faults of each case, and those that each mutant's case finds."""
    torch.set_num_threads(1)
    # What is not written is NaN, and not by chance what an earlier call left there. The public
    # `use_deterministic_algorithms` would import a compiler first, for 3 s.
    torch._C._set_deterministic_algorithms(True)
    found: dict[str, Any] = {name: tried(case.faults) for name, case in CASES.items()}
    caught = {}
    for name, mutant in MUTANTS.items():
        with mutated(mutant):
            caught[name] = tried(lambda own=CASES[mutant.case]: [*islice(own.faults(), 1)])  # type: ignore[misc]
    json.dump({"cases": found, "mutants": caught}, sys.stdout)


if __name__ == "__main__":
    main()
