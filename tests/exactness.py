"""The law of texts through real sockets, against exact autoregressive probabilities.

    python -m tests.exactness [--texts 30000] [--only forest "support 2"]

`make test` runs a part of it (tests/system/serving/test_exactness.py, test_inside_law.py), and
`make exactness` runs all: 30,000 texts for each drafting method of the table, by each rule that
takes its drafts, for each kind of row; then, unless --only names some of these cases, greedy texts,
compared with those of transformers.
Counts are kept in .cache/exactness-<digest of the code>.json, so that a run resumes where an
earlier one of the same code stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM

from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.methods import METHODS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc import messages
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import NO_SHAPING, Shaping
from tandem.speculation.tree import DraftShape
from tests.support.laws.laws import chi_square_p_value
from tests.support.laws.suited import rules_for
from tests.support.models.greedy import compare_greedy
from tests.support.models.heads import is_head, save_random_head
from tests.support.models.probes import extra_rows
from tests.support.models.tiny import VOCAB_SIZE, save_random_llama
from tests.support.processes.services import Trio, generation, trio
from tests.support.repository import ROOT

# Longer than a block of any pool's prefixes. Of all texts of up to four tokens, repeated, it is
# the one after which wrong rules show best: after most, the random models are so far from each
# other that nearly nothing is accepted.
PROMPT = [1, 0, 3, 2] * 9
LENGTH = 4
CELLS = VOCAB_SIZE**LENGTH
# Both kinds of rows: the full vocabulary, and truncated to two tokens.
SUPPORTS = {"dense": "0", "support 2": "2"}
# By drafting method, the rules that take its drafts.
RULES = {
    name: [rule.name for rule in rules_for(recipe.drafter)] for name, recipe in METHODS.items()
}
BRANCHING = [
    name for name, recipe in METHODS.items() if recipe.drafter.traits.shape is not DraftShape.CHAIN
]
# Tokens that `masks` looks ahead.
_MASKS = 2
# Of a draft with branches, whose depth is 3.
_NODES = 6
# Of the orchestrator: a drafter that stands still on a busy machine is waited for.
PATIENT = {"DRAFT_SECONDS": "60", "STAGE_FLOOR_SECONDS": "60"}
# As many as a service takes: their passes are computed together.
_CONCURRENCY = 64
_BATCH = 500


@dataclass(frozen=True)
class Case:
    """One law to compare.

    Attributes:
        verifier: rule's name.
        gamma: draft length; None leaves it to the orchestrator.
        rows: key of SUPPORTS.
        nodes: of a draft with branches; 0 for a chain.
        drafter: name of the drafting method.
    """

    verifier: str
    gamma: int | None
    rows: str
    nodes: int = 0
    drafter: str = "model"

    def __str__(self) -> str:
        drafter = "" if self.drafter == "model" else f", {self.drafter}"
        nodes = f" of {self.nodes} nodes" if self.nodes else ""
        return f"{self.verifier}, gamma {self.gamma}, {self.rows}{drafter}{nodes}"


def cases_of(method: str, rows: str) -> list[Case]:
    """A method by all of its rules; the plain one at three lengths.

    Args:
        method: a name of the table.
        rows: key of SUPPORTS.
    """
    gammas = (1, 3, 5) if method == "model" else (3,)
    nodes = _NODES if method in BRANCHING else 0
    return [Case(rule, gamma, rows, nodes, method) for rule in RULES[method] for gamma in gammas]


def rows_of(method: str) -> list[str]:
    """The kinds of rows that a method sends: without a model most are certain."""
    recipe = built_in(method, DrafterSettings())
    return list(SUPPORTS) if recipe.checkpoints or method == "masks" else ["dense"]


CASES = [case for name in METHODS for rows in rows_of(name) for case in cases_of(name, rows)]
# Of a run: a sound rule fails one of its cases in about 1,000 runs.
SMALLEST_P = 0.001 / len(CASES)


def drafter_settings(method: str, rows: str, folder: Path) -> dict[str, str]:
    """A drafter service's settings.

    Args:
        method: a name of the table.
        rows: key of SUPPORTS.
        folder: with the checkpoints "drafter" and, for a forest, "second"; gets its recipe.
    """
    settings = {
        "MODEL": str(folder / "drafter"),
        "DRAFT_SUPPORT": SUPPORTS[rows],
        "DRAFT_MASS": "1.0",
        # A text that leaves its drafter early gives the slot back a moment later: with as many
        # slots as texts, another one may find the drafter full.
        "MAX_SEQUENCES": str(2 * _CONCURRENCY),
    }
    if method == "forest":
        recipe = folder / "forest.toml"
        recipe.write_text(
            f"""method = "forest"
            [[parts]]
            method = "tree"
            acceptance = [0.6, 0.4]
            [[parts]]
            method = "model"
            model = "{folder / "second"}"
            """
        )
        return {**settings, "RECIPE": str(recipe)}
    if is_head(method):
        head = save_random_head(folder / method, method, folder / "target")
        return {**settings, "METHOD": method, "MODEL": str(head), "TARGET": str(folder / "target")}
    own = {
        "tree": {"ACCEPTANCE": "0.6,0.4,0.3"},
        "chains": {"CHAINS": "2"},
        "phrases": {"PHRASES_NGRAM": "2"},
        "lookahead": {
            "LOOKAHEAD_WINDOW": "3",
            "LOOKAHEAD_NGRAM": "3",
            "LOOKAHEAD_CANDIDATES": "3",
        },
        "masks": {"MASKS": str(_MASKS), "MASKS_TOP": str(VOCAB_SIZE)},
    }
    return {**settings, "METHOD": method, **own.get(method, {})}


def target_settings(method: str, folder: Path) -> dict[str, str]:
    """The settings of a target service whose texts a method drafts; arguments as above."""
    model = folder / "target"
    settings = {"MODEL": str(model), "FEEDBACK": "last" if is_head(method) else "none"}
    if method == "masks":
        settings["EXTRA_EMBEDDINGS"] = extra_rows(folder, model, _MASKS)
    return settings


def target_law(model: Path) -> npt.NDArray[np.float64]:
    """[V ** LENGTH] exact probabilities of the first tokens after PROMPT, in float64."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    texts = torch.tensor(list(product(range(VOCAB_SIZE), repeat=LENGTH)))
    prompts = torch.tensor(PROMPT).expand(len(texts), -1)
    with torch.inference_mode():
        logits = target(torch.cat((prompts, texts), 1)).logits
    log_probs = logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)
    law = log_probs.gather(2, texts[..., None])[..., 0].sum(1).exp()
    return np.asarray(law.numpy(), dtype=np.float64)


def count_texts(
    services: Trio,
    case: Case,
    seeds: range,
    progress: Callable[[int], None] = lambda n: None,
    shaping: Shaping = NO_SHAPING,
) -> npt.NDArray[np.int64]:
    """[V ** LENGTH] how often each text came, for requests with these seeds. Those with even seeds
    share the prefix of their prompt."""
    return asyncio.run(counts_at(services.orchestrator.address, case, seeds, progress, shaping))


async def counts_at(
    address: str,
    case: Case,
    seeds: range,
    progress: Callable[[int], None] = lambda n: None,
    shaping: Shaping = NO_SHAPING,
) -> npt.NDArray[np.int64]:
    """As `count_texts`, of an orchestrator at an address."""
    counts = np.zeros(CELLS, dtype=np.int64)
    waiting = iter(seeds)
    weights = VOCAB_SIZE ** np.arange(LENGTH - 1, -1, -1)

    async def work(stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub) -> None:
        for seed in waiting:
            message = generation(
                PROMPT,
                # One token is the prefill's; a draft must not be cut short by the end.
                max_new_tokens=1 + max(LENGTH - 1, 8 if case.gamma is None else case.gamma),
                seed=seed,
                gamma=case.gamma,
                verifier=case.verifier,
                max_nodes=case.nodes or None,
            )
            message.cache_salt = f"{case} {seed}"[-128:] if seed % 2 else ""
            if shaping:
                own = messages.sampling_to(Sampling(shaping=shaping)).shaping
                message.sampling.shaping.CopyFrom(own)
            reply = await stub.Complete(pb.CompleteRequest(generation=message), timeout=300)
            assert not reply.summary.drafter_lost
            assert not (seed % 2 and reply.summary.cached_tokens)
            counts[int(np.dot(weights, reply.token_ids[:LENGTH]))] += 1
            progress(1)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        await asyncio.gather(*(work(stub) for _ in range(_CONCURRENCY)))
    return counts


def _run_laws(console: Console, texts: int, only: Sequence[str], store: Path) -> bool:
    cases = [case for case in CASES if all(word in f"{case}, {case.drafter}" for word in only)]
    if not cases:
        known = ", ".join(METHODS)
        raise SystemExit(f"--only {' '.join(only)}: no case has these words; methods are {known}")
    counted: dict[str, list[int]] = json.loads(store.read_text()) if store.exists() else {}
    table = Table("case", "texts", "p-value", "verdict")
    sound = True
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console) as bar:
        folder = Path(scratch)
        save_random_llama(folder / "drafter", 2)
        save_random_llama(folder / "second", 3)
        target = save_random_llama(folder / "target", 1)
        law = target_law(target)
        total = bar.add_task("texts", total=texts * len(cases))
        for method, rows in product(METHODS, SUPPORTS):
            mine = [case for case in cases if (case.drafter, case.rows) == (method, rows)]
            if not mine:
                continue
            settings = drafter_settings(method, rows, folder)
            served = target_settings(method, folder)
            with trio(folder, drafter=settings, target=served, orchestrator=PATIENT) as services:
                for case in mine:
                    counts = np.array(counted.get(str(case), [0] * CELLS))
                    bar.advance(total, int(counts.sum()))
                    while (done := int(counts.sum())) < texts:
                        seeds = range(done, min(done + _BATCH, texts))
                        counts += count_texts(services, case, seeds)
                        counted[str(case)] = counts.tolist()
                        store.parent.mkdir(exist_ok=True)
                        store.write_text(json.dumps(counted))
                        bar.advance(total, len(seeds))
                    p_value = chi_square_p_value(counts, law)
                    sound &= p_value > SMALLEST_P
                    verdict = "exact" if p_value > SMALLEST_P else "[red]WRONG LAW[/]"
                    table.add_row(str(case), str(int(counts.sum())), f"{p_value:.4f}", verdict)
    console.print(table)
    return sound


def _digest() -> str:
    """Of the code under test: counts of other code must not be added to."""
    folders = ("tandem", "drafter_svc", "target_svc", "orchestrator")
    sources = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def main() -> None:
    """Run everything; exit code 1 if a law is wrong or a greedy text differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=30_000, help="of each case")
    parser.add_argument("--only", nargs="+", default=[], help="cases with all of these words")
    options = parser.parse_args()
    console = Console()
    started = time.monotonic()
    store = ROOT / ".cache" / f"exactness-{_digest()}.json"
    sound = _run_laws(console, options.texts, options.only, store)
    equal = bool(options.only) or compare_greedy(console, prompts=50, tokens=128)
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    sys.exit(0 if sound and equal else 1)


if __name__ == "__main__":
    main()
