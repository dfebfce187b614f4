"""Which divergence on whose texts makes the best drafter: `python -m models.zoo.distill`.

With `--embedded` the embedded drafter learns on, in the way that was best, and is written to
models/distilled.

DistillSpec's table (arXiv 2310.08461) for the embedded pair, by the trainer of `tandem distill`.
All cells begin with one drafter, which learnt the tokens of the corpus alone, and have the same
seconds of CPU. What is there already is not trained again; a cell that was cut goes on.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from models import corpus
from tandem.distillation.allocator import keep_freed_memory
from tandem.distillation.distilled import Distilled
from tandem.distillation.plan import Data, Distillation
from tandem.distillation.run import distill

DIVERGENCES = ("forward-kl", "reverse-kl", "jsd", "tvd")
BEFORE = "cross-entropy on corpus"
# Of the start, which is a fresh drafter, and of what begins with it.
START_RATE, RATE = 1e-2, 3e-3
LAYERS, WIDTH, LENGTH = 2, 160, 256
# Of the table, on held-out text; and how long the embedded drafter learns on by it.
BEST: dict[str, Any] = {"divergence": "tvd", "data": "corpus"}
LEARN_ON_MINUTES = 25.0


def prompts(folder: Path) -> tuple[Path, Path]:
    """Files of the corpus' texts: to learn from, and held out."""
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    for path, out in zip(files, (False, True), strict=True):
        texts = [text for name, text in corpus.sources() if corpus.held_out(name) is out]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def cell(plan: Distillation, output: Path) -> Distilled:
    """Train one drafter, or go on; its minutes are of the CPU time of all its threads."""
    at = time.monotonic()

    def progress(where: Any) -> None:
        nonlocal at
        if time.monotonic() - at > 30:
            at = time.monotonic()
            print(f"  {where.share:.0%} α {dict(where.overlap)}", flush=True)

    threads = torch.get_num_threads()
    return distill(
        plan, output, say=print, progress=progress, clock=lambda: time.process_time() / threads
    )


def row_of(outcome: Distilled, base: Distilled | None) -> dict[str, Any]:
    """Figures of a cell; beside those of cross-entropy, text by text."""
    figures: dict[str, Any] = {
        "steps": outcome.steps,
        "minutes": round(outcome.seconds / 60, 1),
        **{kind: each.summary() for kind, each in outcome.best.items()},
        "tokens_a_round": {
            f"temperature {at}": float(np.mean(after))
            for at, (_, after) in outcome.tokens_a_round.items()
        },
    }
    if base is not None:
        figures["more_than_cross_entropy"] = {
            "text": paired(outcome.best["text"].overlap, base.best["text"].overlap),
            "target": paired(outcome.best["target"].overlap, base.best["target"].overlap),
            **{
                f"tokens a round, temperature {at}": paired(after, base.tokens_a_round[at][1])
                for at, (_, after) in outcome.tokens_a_round.items()
            },
        }
    return figures


def paired(one: Any, other: Any) -> dict[str, float]:
    """The mean difference of texts, and its standard error."""
    differences = np.asarray(one) - np.asarray(other)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return {"mean": float(differences.mean()), "error": float(error)}


def learn_on(pair: Path, train: Path, held_out: Path, cache: Path) -> None:
    """Distil the embedded drafter from what it is, and write it beside the pair."""
    plan = Distillation(
        target=str(pair / "target"),
        drafter=str(pair / "drafter"),
        prompts=str(train),
        held_out=str(held_out),
        minutes=LEARN_ON_MINUTES,
        measure_every=100,
        **BEST,
    )
    output = cache / "embedded"
    print(json.dumps(row_of(cell(plan, output), None), indent=2))
    shutil.copytree(
        output, pair / "distilled", ignore=shutil.ignore_patterns("run"), dirs_exist_ok=True
    )


def main() -> None:
    """Train the start, cross-entropy and the cells; write the table after each."""
    parser = argparse.ArgumentParser(prog="python -m models.zoo.distill", description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path("models"), help="has the target")
    parser.add_argument("--cache", type=Path, default=Path(".cache/distill"))
    parser.add_argument("--output", type=Path, default=Path("models/distill.json"))
    parser.add_argument("--minutes", type=float, default=10.0, help="a cell")
    parser.add_argument("--divergences", nargs="+", choices=DIVERGENCES, default=DIVERGENCES)
    parser.add_argument("--data", nargs="+", choices=get_args(Data), default=get_args(Data))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--embedded", action="store_true", help="the embedded drafter learns on")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    train, held_out = prompts(options.cache)
    if options.embedded:
        learn_on(options.pair, train, held_out, options.cache)
        return
    common: dict[str, Any] = {
        "target": str(options.pair / "target"),
        "prompts": str(train),
        "held_out": str(held_out),
        "minutes": options.minutes,
        "length": LENGTH,
    }
    tokens: dict[str, Any] = {"divergence": "cross-entropy", "data": "corpus"}
    start = options.cache / "start"
    fresh: dict[str, Any] = {"drafter": "", "layers": LAYERS, "width": WIDTH, "rate": START_RATE}
    begun = cell(Distillation(**common, **tokens, **fresh), start)
    common |= {"drafter": str(start), "rate": RATE}
    found = {BEFORE: cell(Distillation(**common, **tokens), options.cache / "cross-entropy-corpus")}
    for divergence in options.divergences:
        for data in options.data:
            name = f"{divergence} on {data}"
            print(name, flush=True)
            plan = Distillation(**common, divergence=divergence, data=data)
            found[name] = cell(plan, options.cache / f"{divergence}-{data}")
            cells = {
                name: row_of(each, found[BEFORE] if name != BEFORE else None)
                for name, each in found.items()
            }
            table = {"start": row_of(begun, None), "cells": cells}
            options.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
