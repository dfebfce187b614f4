"""What a round costs beside the model at a vocabulary of 151,936 tokens.

    python -m benchmarks.large_vocabulary [--threads 2]

Five target rows through top-p, then a verifier, as the target's engine does it; rows of a
peaked distribution with a long tail, like those of a trained model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.measure.environment import RESULTS, describe
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.sampling import Sampling
from tandem.verification import VERIFIERS

VOCAB_SIZE = 151_936
GAMMA = 4
_REPEATS = 50
_WARM_UP = 5


def make_rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits of the target [G+1, V] and of a drafter [G, V] that is not far from it."""
    shared = 2 * torch.randn(1, VOCAB_SIZE, generator=generator)
    shared[0, :40] += 12
    target, drafter = (
        shared + 0.7 * torch.randn(count, VOCAB_SIZE, generator=generator)
        for count in (GAMMA + 1, GAMMA)
    )
    return target, drafter


def make_draft(logits: Tensor, sampling: Sampling) -> Draft:
    """A draft from the drafter's rows, as its service makes it."""
    rows = Categorical.quantize(process(logits, [sampling]), 0.999, 512)
    tokens = rows.draw(torch.tensor([[0, (2 * i + 1) << 28] for i in range(GAMMA)]))
    arrays = (tokens.numpy(), rows.ids.numpy(), rows.weights.numpy())
    (draft,) = Draft.batch(*arrays, [GAMMA])
    assert draft is not None  # the rows are finite
    return draft


def milliseconds(work: Callable[[], object]) -> float:
    """Median time."""
    times = []
    for repeat in range(_WARM_UP + _REPEATS):
        started = time.perf_counter_ns()
        work()
        if repeat >= _WARM_UP:
            times.append(time.perf_counter_ns() - started)
    return median(times) / 1e6


def main() -> None:
    """Measure, print and write benchmarks/results/large_vocabulary.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(top_p=0.95)
    with torch.inference_mode():
        logits, drafter_logits = make_rows(generator)
        draft = make_draft(drafter_logits, sampling)
        uniforms = torch.rand(1, GAMMA + 1, generator=generator, dtype=torch.float64)

        def decide(verifier: str) -> None:
            probs = process(logits, [sampling] * (GAMMA + 1))[None]
            VERIFIERS[verifier].verify(Proposal.from_drafts([draft]), probs, uniforms, [None])

        found = {"distributions": milliseconds(lambda: process(logits, [sampling]))}
        for verifier in track(VERIFIERS, description="verifiers"):
            found[f"distributions + {verifier}"] = milliseconds(partial(decide, verifier))
    table = Table(f"5 rows of {VOCAB_SIZE:,}, top-p 0.95, {threads} threads", "p50, ms")
    for name, value in found.items():
        table.add_row(name, f"{value:.2f}")
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    result = {"environment": describe(), "threads": threads, "p50_ms": found}
    (RESULTS / "large_vocabulary.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
