"""What the scripts of this folder take from the command line."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tandem.distillation.allocator import keep_freed_memory


def options_of(name: str, doc: str | None, cache: str, flags: Mapping[str, str] = {}) -> Any:
    """The options of a script, which is started again where its allocator is not set yet.

    Args:
        name: of its module.
        doc: of its module.
        cache: its default folder for what continues an interrupted run.
        flags: its own options by their names, each with its help.
    """
    parser = argparse.ArgumentParser(prog=f"python -m models.zoo.{name}", description=doc)
    parser.add_argument("part", choices=["train", "evaluate", "all"])
    parser.add_argument("--pair", type=Path, default=Path("models"), help="the embedded pair")
    parser.add_argument("--cache", type=Path, default=Path(cache))
    parser.add_argument("--output", type=Path, default=Path("models"))
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every step count")
    parser.add_argument("--threads", type=int, default=1)
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    return options


def run(
    name: str,
    doc: str | None,
    fit: Callable[[Path, Path, Path, float], None],
    report: Callable[[Path, Path], None],
) -> None:
    """A script that trains and measures one thing.

    Args:
        name: of its module.
        doc: of its module.
        fit: trains: with the pair, the cache, the output and the scale.
        report: measures: with the pair and the output.
    """
    options = options_of(name, doc, ".cache/heads")
    if options.part != "evaluate":
        fit(options.pair, options.cache, options.output, options.scale)
    if options.part != "train":
        report(options.pair, options.output)


def write_figures(output: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write what was measured beside what was trained, and print it."""
    text = json.dumps(figures, indent=2) + "\n"
    (output / f"{name}.json").write_text(text)
    print(text, flush=True)
