"""Rounds of a target's own generator over tiny models, with probes at all places."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.engine.answers import Decision, DeviceVerdict, ScoredRows
from tandem.engine.asks import Decide, Score, Steps, Take, ToHost
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.inference.decoder import Decoder
from tandem.inference.loading.extra_embeddings import MadeFor, write_extra_embeddings
from tandem.speculation.draft import Draft
from tandem.speculation.probes import Probes
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from target_svc.round import TargetRequest, TargetSequence, open_, verify
from tests.support.decoders import decoder_over
from tests.support.models.architectures import VOCAB_SIZE, Architecture, build

EXTRA = 3
PROMPT = [5, 17, 3, 80, 41, 9]
NODES = 64


def extra_rows(folder: Path, model: Path, count: int) -> str:
    """A folder with extra embeddings for a checkpoint."""
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(2))
    write_extra_embeddings(folder, rows, MadeFor())
    return str(folder)


def decoder_of(row: Architecture, engine: Any = "torch", **options: Any) -> Decoder:
    model = build(row, **options)
    width = model.get_input_embeddings().weight.shape[1]
    rows = torch.randn(EXTRA, width, generator=torch.Generator().manual_seed(4)) * 0.3
    return decoder_over(
        model, "target", cache_tokens=512, engine=engine, trees=True, extra_embeddings=rows
    )


def run(decoder: Decoder, steps: Steps[Any], seen: list[Any] | None = None) -> Any:
    """The result of a round's steps; what the rule saw of the pass goes to `seen`."""
    answer: Any = None
    while True:
        try:
            ask = steps.send(answer)
        except StopIteration as ended:
            return ended.value
        if isinstance(ask, (Take, Score)):
            with torch.inference_mode():
                output = decoder.forward([ask.feed])
            answer = ScoredRows(output.logits, 0, ask.feed.rows)
        elif isinstance(ask, Decide):
            if seen is not None:
                seen.append(ask)
            (answer,) = decide([ask])
        else:
            assert isinstance(ask, ToHost)
            assert isinstance(ask.answers, DeviceVerdict)
            (answer,) = decisions_of([ask.answers])


def begun(decoder: Decoder, rule: str = "block", wanted: Any = None) -> TargetSequence:
    request = TargetRequest(Sampling(seed=3), VERIFIERS[rule], NODES, feedback=wanted)
    sequence = TargetSequence(list(PROMPT), request)
    cache = decoder.reserve(64 + NODES, NODES)
    assert cache is not None
    sequence.caches = [cache]
    run(decoder, open_(decoder, sequence, 0))
    return sequence


def drafts() -> dict[str, Draft]:
    rng = np.random.default_rng(2)
    chain = Draft(
        [int(token) for token in rng.integers(VOCAB_SIZE, size=3)],
        [VOCAB_SIZE] * 3,
        np.tile(np.arange(VOCAB_SIZE, dtype=np.uint32), 3),
        rng.integers(1, 65535, 3 * VOCAB_SIZE).astype(np.uint16),
    )
    # With a twin, node 2.
    tree = Draft.certain([7, 30, 7, 11, 50], [0, 0, 0, 1, 2])
    return {"chain": chain, "tree": tree, "none": Draft.certain(())}


def probed(draft: Draft, count: int = 40, extra: int = EXTRA) -> Draft:
    """The draft with probes at all places, and after each other."""
    rng = np.random.default_rng(len(draft))
    homes = draft.homes()
    places = [0, *(node for node, home in enumerate(homes, 1) if home == node)]
    parents: list[int] = []
    for probe in range(count):
        parents.append(int(rng.choice(places)))
        places.append(len(draft) + 1 + probe)
    token_ids = rng.integers(VOCAB_SIZE + extra, size=count).tolist()
    probes = Probes(tuple(token_ids), tuple(parents))
    assert not probes.fault(homes, VOCAB_SIZE, extra)
    return replace(draft, probes=probes)


def rounds_of(decoder: Decoder, draft: Draft) -> tuple[list[Decision], list[torch.Tensor]]:
    """Two rounds, and the rows that the rule saw in them."""
    sequence, seen = begun(decoder), []
    decisions: list[Decision] = []
    for round_ in (1, 2):
        asked: list[Decide] = []
        decisions.append(run(decoder, verify(decoder, sequence, round_, draft), asked))
        (ask,) = asked
        seen.append(ask.scored.logits[: ask.scored.count].float())
    decoder.release(sequence.caches[0])
    return decisions, seen
