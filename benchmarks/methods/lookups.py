"""What a look-up of `retrieval` finds and takes, without services.

    python -m benchmarks.methods.lookups [--rounds 2000]

Builds an index of Python's standard library without the held-out files, and follows held-out text:
each round drafts behind the text so far, keeps what the text goes on with, and moves on by that and
a token. So a round counts as with greedy decoding of a model that writes this text.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.tables import table_of
from benchmarks.methods.texts import training_index
from models import corpus
from tandem.retrieval.corpus import BigramStore, CorpusStore, OpenIndex
from tandem.retrieval.index import Index
from tandem.retrieval.merged import MergedTree
from tandem.retrieval.prompt import PromptStore
from tandem.retrieval.store import TextStore
from tandem.tools.local.process import ROOT

SIZES = ((4, 4), (16, 8), (64, 8))  # nodes, depth
CONTEXT, MATCH = 4096, 16
_MIB = 1 << 20


@dataclass(frozen=True)
class Looked:
    """Stores with a size of drafts.

    Attributes:
        tokens: a round.
        p50_ms: of a look-up, as the next ones.
    """

    stores: str
    nodes: int
    depth: int
    tokens: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


def follow(
    stores: Sequence[TextStore],
    text: Sequence[int],
    first: int,
    nodes: int,
    depth: int,
    vocab_size: int,
    rounds: int,
) -> tuple[float, list[float]]:
    """Tokens a round, and the seconds of each look-up.

    Args:
        stores: see `MergedTree.fill`.
        text: token ids.
        first: place of the first round.
        nodes: of a draft.
        depth: of a draft.
        vocab_size: of the ids.
        rounds: at most.
    """
    place, spent = first, list[float]()
    while len(spent) < rounds and place + depth < len(text):
        context = text[max(0, place - CONTEXT) : place]
        since = time.perf_counter()
        tree = MergedTree(nodes, vocab_size)
        for store in stores:
            tree.fill(store.continuations(context, depth))
        spent.append(time.perf_counter() - since)
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(tree.parents, tree.token_ids, strict=True), 1
            )
        }
        at = 0
        while (at := children.get((at, text[place]), 0)) > 0:
            place += 1
        place += 1
    return (place - first) / len(spent), spent


def main() -> None:
    """Measure, print and write benchmarks/results/lookups.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="of each line")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "target" / "tokenizer.json"))
    held_out = [text for name, text in corpus.sources() if corpus.held_out(name)]
    text = tokenizer.encode("".join(held_out), add_special_tokens=False).ids
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        folder = training_index(tokenizer, Path(scratch))
        seconds = time.monotonic() - began
        size = sum(path.stat().st_size for path in folder.iterdir()) / _MIB
        index = Index(folder)
        opened = OpenIndex(index)
        prompt, whole = PromptStore(MATCH, CONTEXT), CorpusStore(opened, MATCH)
        stores: Mapping[str, Sequence[TextStore]] = {
            "prompt": [prompt],
            "prompt, bigrams": [prompt, BigramStore(opened)],
            "corpus": [whole],
            "prompt, corpus": [prompt, whole],
        }
        for name, own in stores.items():
            for nodes, depth in SIZES:
                tokens, spent = follow(
                    *(own, text, 512, nodes, depth, index.about.vocab_size, options.rounds)
                )
                times = np.percentile(spent, (50, 95, 99)) * 1e3
                lines.append(Looked(name, nodes, depth, tokens, *map(float, times)))
    built = {"tokens": index.about.tokens, "seconds": seconds, "mib": size}
    console = Console(width=120)
    console.print(built)
    console.print(table_of(map(asdict, lines)))
    keep(RESULTS / "lookups.json", index=built, lines=[asdict(line) for line in lines])


if __name__ == "__main__":
    main()
