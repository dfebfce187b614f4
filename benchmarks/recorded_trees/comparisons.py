"""What is compared with what, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.measure.ratio import ratio
from benchmarks.recorded_trees.methods import Drafted, Plan, proposal_of, rows_of
from benchmarks.sweep.branching import Grown
from benchmarks.sweep.expectation import expected_kept
from tandem.drafting.shape import likeliest

Case = tuple[str, str]
"""A rule, and the name of a draft."""


@dataclass(frozen=True)
class Comparison:
    """One case over another.

    Attributes:
        case: that should be ahead.
        base: of what.
        bar: by how much at least; None where it is told and nothing is expected.
    """

    case: Case
    base: Case
    bar: float | None


@dataclass(frozen=True)
class Figure:
    """Expected tokens of a round; standard errors are over texts."""

    rule: str
    draft: str
    nodes: int
    depth: int
    tokens: float
    tokens_se: float


@dataclass(frozen=True)
class Found:
    """A comparison's ratio, paired over the same rounds."""

    case: Case
    base: Case
    ratio: float
    ratio_se: float
    bar: float | None
    met: bool | None


ALONE, AROUND, DEEP = "16 nodes, depth 4", "chain of 4", "16 nodes, depth 8"
TWO, FOREST = "2 chains of 4", "2 chains of 4, boosted"
TWO_DISTINCT, FOREST_DISTINCT = f"{TWO}, distinct", f"{FOREST}, distinct"
COMPARISONS = (
    Comparison(("token", ALONE), ("token", AROUND), 1.08),
    Comparison(("block", ALONE), ("block", AROUND), 1.07),
    Comparison(("block", DEEP), ("block", "chain of 8"), 1.03),
    Comparison(("spectr", "4 chains of 4"), ("token", AROUND), 1.08),
    Comparison(("spectr", "4 chains of 4"), ("token", "4 chains of 4"), 1.0),
    Comparison(("gbv", "2 chains of 8"), ("block", "2 chains of 8"), 1.02),
    # A forest's parts are distinct siblings at the root.
    Comparison(("token", FOREST_DISTINCT), ("token", TWO_DISTINCT), 1.0),
    Comparison(("block", FOREST_DISTINCT), ("block", TWO_DISTINCT), 1.0),
    Comparison(("token", FOREST), ("token", TWO), None),
    Comparison(("block", FOREST), ("block", TWO), None),
    Comparison(("token", TWO_DISTINCT), ("token", TWO), None),
    Comparison(("block", "chain of 16"), ("block", DEEP), None),
)
_MORE = (
    ("token", "chain of 8"),
    ("token", DEEP),
    ("token", "chain of 16"),
    ("gbv", "4 chains of 4"),
)


def plan_of(acceptance: Sequence[float], *, boosted: bool) -> tuple[Plan, dict[str, Drafted]]:
    """All nodes to record, and all drafts of them by name.

    Args:
        acceptance: by sibling rank, for the shapes.
        boosted: whether there is a second drafter, model 1.
    """
    plan = Plan(16)
    drafts = [plan.chain(length) for length in (4, 8, 16)]
    drafts += [
        plan.tree(ALONE, likeliest(acceptance, 4, 16)),
        plan.tree(DEEP, likeliest(acceptance, 8, 16)),
    ]
    long = plan.path(8)
    others = [range(4), long[:4], plan.path(4), plan.path(4)]
    drafts += [
        plan.chains("2 chains of 8", [range(8), long]),
        plan.chains("4 chains of 4", others),
        plan.chains(TWO, others[:2]),
        plan.chains(TWO_DISTINCT, [range(4), plan.path(4, without=True)], distinct=True),
    ]
    if boosted:
        second, apart = plan.path(4, 1), plan.path(4, 1, without=True)
        drafts += [
            plan.chains(FOREST, [range(4), second]),
            plan.chains(FOREST_DISTINCT, [range(4), apart], distinct=True),
        ]
    return plan, {drafted.name: drafted for drafted in drafts}


def cases_of(drafts: dict[str, Drafted]) -> list[Case]:
    """All that are compared, and some that stand in the table alone."""
    wanted = [case for each in COMPARISONS for case in (each.base, each.case)]
    return [case for case in dict.fromkeys((*wanted, *_MORE)) if case[1] in drafts]


def expected(
    plan: Plan, drafts: dict[str, Drafted], grown: Grown, cases: Sequence[Case]
) -> dict[Case, torch.Tensor]:
    """[S] expected tokens of a round of each case, on the same recorded nodes."""
    found = {}
    for rule, name in cases:
        drafted = drafts[name]
        proposal = proposal_of(drafted, plan.nodes, grown)
        found[rule, name] = 1 + expected_kept(rule, proposal, rows_of(drafted, grown))
    return found


def figures_of(
    drafts: dict[str, Drafted],
    sums: dict[Case, list[float]],
    rounds: int,
    depth: Callable[..., int],
) -> list[Figure]:
    """Tokens a round of each case; `sums` has a text's tokens of so many rounds."""
    return [
        Figure(
            rule,
            name,
            len(drafts[name].nodes),
            depth(drafts[name]),
            *ratio(each, [rounds] * len(each)),
        )
        for (rule, name), each in sums.items()
    ]


def compared(sums: dict[Case, list[float]]) -> list[Found]:
    """Each comparison whose cases were recorded."""
    found = []
    for each in COMPARISONS:
        if each.case not in sums:
            continue
        value, error = ratio(sums[each.case], sums[each.base])
        met = None if each.bar is None else value >= each.bar
        found.append(Found(each.case, each.base, value, error, each.bar, met))
    return found
