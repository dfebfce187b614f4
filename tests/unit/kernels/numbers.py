"""Draws and verdicts, each beside its operator's form for a CPU, and mutants of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tandem.kernels import draws, verdicts
from tandem.speculation.categorical import Categorical
from tandem.speculation.request.sampling import Sampling
from tests.support.devices.drafted import CHAIN, KINDS, Kind, drafted, drawn_from
from tests.unit.kernels.interpreter import Mutant, compared


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


_CUTS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.7, top_k=40, top_p=0.9),
    Sampling(min_p=0.1),
    Sampling(temperature=0),
    Sampling(top_p=0.5, min_p=0.05),
]
CASES: dict[str, Drawn | Decided] = {
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


def _draws(right: str, wrong: str, case: str) -> Mutant:
    return Mutant("triton_draws", right, wrong, case)


def _verdicts(right: str, wrong: str, case: str = "a chain") -> Mutant:
    return Mutant("triton_verdicts", right, wrong, case)


MUTANTS = {
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
