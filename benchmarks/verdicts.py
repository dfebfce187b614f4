"""What a verdict takes on one core: trees and chains, by rule.

    python -m benchmarks.verdicts [--repeats 300]

Rows are made up, with a vocabulary of 2,048. "Rule" is a rule on a proposal that is laid out
already; "whole" is all that the engine does between the logits and the verdict on the host.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from tandem.drafting.shape import likeliest
from tandem.engine.asks import Decide, Scored
from tandem.engine.decisions import decide, decisions_of
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import Foreseen, Purpose, uniforms
from tandem.speculation.sampling import Sampling
from tandem.verification import VERIFIERS

VOCAB_SIZE = 2048
# The drafter's defaults.
_ACCEPTANCE, _MASS, _SUPPORT = (0.74, 0.08, 0.035), 0.999, 512
_SHAPES = {"chain of 4": (4, 4), "16 nodes, depth 4": (4, 16), "16 nodes, depth 8": (8, 16)}
_ROUNDS = 16


@dataclass(frozen=True)
class Row:
    """Milliseconds of one round: medians, and the least: where nobody disturbs."""

    rule: str
    shape: str
    rule_ms: float
    whole_ms: float
    whole_least_ms: float


def round_of(depth: int, nodes: int, seed: int) -> tuple[Draft, torch.Tensor]:
    """A draft of the likeliest shape, siblings without replacement, and the target's logits."""
    generator = torch.Generator().manual_seed(seed)
    parents = likeliest(_ACCEPTANCE, depth, nodes).parents()
    logits = 3.5 * torch.randn(nodes + 1, VOCAB_SIZE, generator=generator)
    near = logits + 1.5 * torch.randn(logits.shape, generator=generator)
    places = sorted(set(parents))
    rows = Categorical.quantize(near[places].softmax(-1), _MASS, _SUPPORT)
    left, tokens = rows.weights.double(), []
    row_of = [places.index(place) for place in parents]
    for row in row_of:
        entry = int(torch.multinomial(left[row], 1, generator=generator))
        left[row, entry] = 0
        tokens.append(int(rows.ids[row, entry]))
    sent = (rows.weights > 0).numpy()
    draft = Draft(
        tokens,
        sent.sum(1).tolist(),
        rows.ids.numpy()[sent].astype(np.uint32),
        rows.weights.numpy()[sent].astype(np.uint16),
        None if depth == nodes else parents,
        None if depth == nodes else row_of,
        depth != nodes,
    )
    return draft, logits


def ask_of(rule: str, draft: Draft, logits: torch.Tensor, number: int) -> Decide:
    """For the engine, with its random numbers foreseen."""
    accepting, following = (
        Foreseen(7, purpose, uniforms) for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)
    )
    accepting.take(number, len(draft)), following.take(number, 1)
    scored = Scored(logits, 0, len(logits))
    return Decide(VERIFIERS[rule], draft, scored, Sampling(), None, accepting, following, number)


def timed(run: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def measure(repeats: int) -> list[Row]:
    """All rules and shapes, in turn."""
    cases = {
        (rule, name): [round_of(*size, seed) for seed in range(_ROUNDS)]
        for name, size in _SHAPES.items()
        for rule in ("token", "block")
    }
    spent: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
    for number in range(repeats + 3):
        for (rule, name), rounds in cases.items():
            draft, logits = rounds[number % _ROUNDS]
            ask = ask_of(rule, draft, logits, number)
            proposal = Proposal.from_drafts([draft])
            rows = draft.row_of_places()
            probs = process(logits, [Sampling()] * len(logits))[list(rows)][None]
            numbers = torch.rand(1, len(draft) + 1, dtype=torch.float64)
            verify = VERIFIERS[rule].verify
            alone = timed(lambda v=verify, a=(proposal, probs, numbers): v(*a))  # type: ignore[misc]
            whole = timed(lambda a=ask: decisions_of([d for d in decide([a]) if d]))  # type: ignore
            spent[rule, name].append((alone, whole))
    found = []
    for (rule, name), times in spent.items():
        rules, wholes = zip(*times[3:], strict=True)
        found.append(Row(rule, name, median(rules), median(wholes), min(wholes)))
    return found


def main() -> None:
    """Measure, print, and write benchmarks/results/verdicts.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rows = measure(repeats)
    table = Table("rule", "shape", "rule, ms", "whole, ms", "whole, least ms")
    for row in rows:
        times = (row.rule_ms, row.whole_ms, row.whole_least_ms)
        table.add_row(row.rule, row.shape, *(f"{ms:.2f}" for ms in times))
    Console().print(table)
    result = {"environment": describe(), "rows": [asdict(row) for row in rows]}
    (RESULTS / "verdicts.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
