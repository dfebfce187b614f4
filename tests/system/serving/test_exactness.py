"""The joint law of four tokens through three processes and real sockets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.drafting.methods import METHODS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.speculation.request.shaping import Shaping
from tests.exactness import (
    BRANCHING,
    LENGTH,
    PATIENT,
    PROMPT,
    RULES,
    SMALLEST_P,
    Case,
    count_texts,
    drafter_settings,
    rows_of,
    target_law,
    target_settings,
)
from tests.support.laws.laws import chi_square_p_value
from tests.support.laws.shaping import law_of
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.processes.services import generation, trio

OTHERS = pytest.mark.campaign(
    "the law through sockets, of every chain method, rule and kind of row",
    "`model` (this file); `jacobi` and `masks` (service/recipes/test_predicted.py); every method"
    " and rule enumerated (unit/drafting, unit/verification); seeded texts of every rule",
)

# The p-value of `mutant_target` is 4e-45 at as many, that of `mutant_kernel` 4e-32. Half as many
# show both: these are in `make test`.
TEXTS, FEWER = 800, 400
# In `make test`. Of rows of two tokens as many texts would not show that a rule stops too early.
# The rules for several chains decide a chain as these do, number by number
# (tests/unit/verification/test_tree_rules.py).
ONCE = ("model", "dense", ["block", "greedy_block"])


# Methods with branches are in test_trees.py; `make exactness` has all, and more of each.
@pytest.mark.parametrize(
    ("method", "rows", "rules", "texts"),
    [
        pytest.param(*ONCE, FEWER, id="model-dense, block and greedy_block"),
        *(
            pytest.param(name, rows, RULES[name], TEXTS, marks=OTHERS, id=f"{name}-{rows}")
            for name in METHODS
            if name not in BRANCHING
            for rows in rows_of(name)
        ),
    ],
)
def test_the_law_is_the_targets(
    method: str,
    rows: str,
    rules: Sequence[str],
    texts: int,
    random_pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    drafter, target = random_pair
    law, others = target_law(target), target_law(drafter)
    settings = drafter_settings(method, rows, drafter.parent)
    served = target_settings(method, target.parent)
    with trio(tmp_path, drafter=settings, target=served, orchestrator=PATIENT) as services:
        for rule in rules:
            case = Case(rule, 3, rows, drafter=method)
            counts = count_texts(services, case, range(texts))
            assert chi_square_p_value(counts, law) > SMALLEST_P, case
            assert chi_square_p_value(counts, others) < SMALLEST_P, "the drafter's law would pass"
        with services.client() as client:
            asked = pb.CompleteRequest(generation=generation(PROMPT, max_new_tokens=1, seed=0))
            summary = client.Complete(asked).summary
        assert summary.cached_tokens >= len(PROMPT) // 2, "texts of even seeds were warm"
        services.wait_idle()


@pytest.mark.campaign(
    "a wrong target or kernel is noticed through sockets",
    "counts differ from the drafter's law (this file); unit/verification: kernels and mutants",
)
@pytest.mark.parametrize("mutant", ["mutant_target", "mutant_kernel"])
def test_a_mutant_server_fails(mutant: str, random_pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter, target = random_pair
    with trio(
        tmp_path,
        drafter={"MODEL": str(drafter), "DRAFT_SUPPORT": "0"},
        target={"MODEL": str(target)},
        orchestrator=PATIENT,
        target_module=f"tests.system.serving.{mutant}",
    ) as services:
        counts = count_texts(services, Case("block", 3, "dense"), range(FEWER))
    assert chi_square_p_value(counts, target_law(target)) < SMALLEST_P


SHAPING = Shaping(
    logit_bias=((0, 1.0), (3, -0.7)),
    repetition_penalty=1.5,
    frequency_penalty=0.8,
    presence_penalty=-0.5,
    bad_words=((4, 1), (2, 2, 0), (3, 0)),
)


def shaped_law(model: Path) -> npt.NDArray[np.float64]:
    """[V ** LENGTH] exact probabilities of the first tokens after PROMPT."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    texts = list(product(range(VOCAB_SIZE), repeat=LENGTH))
    with torch.inference_mode():
        logits = target(torch.tensor([[*PROMPT, *text] for text in texts])).logits.numpy()
    law = np.ones(len(texts))
    for cell, text in enumerate(texts):
        for place, token in enumerate(text):
            row = logits[cell, len(PROMPT) - 1 + place]
            found = law_of(row, SHAPING, PROMPT, text[:place])
            law[cell] *= 0.0 if found is None else found[token]
    assert abs(law.sum() - 1) < 1e-9
    return law


@pytest.mark.campaign(
    "the law of shaped texts through sockets, chains and trees",
    "unit/target/test_shaping_law.py: it enumerated; service/http/test_shaping.py: counts "
    "of choices",
)
@pytest.mark.parametrize(
    ("method", "rules", "nodes"),
    [("model", ("block", "token", "greedy_block"), 0), ("tree", ("block", "token"), 6)],
)
def test_the_law_is_the_shaped_one(
    method: str,
    rules: tuple[str, ...],
    nodes: int,
    random_pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    drafter, target = random_pair
    law, plain = shaped_law(target), target_law(target)
    settings = drafter_settings(method, "dense", drafter.parent)
    with trio(
        tmp_path, drafter=settings, target={"MODEL": str(target)}, orchestrator=PATIENT
    ) as services:
        for rule in rules:
            case = Case(rule, 3, "dense", nodes, method)
            counts = count_texts(services, case, range(2 * TEXTS), shaping=SHAPING)
            assert chi_square_p_value(counts, law) > SMALLEST_P, case
            assert chi_square_p_value(counts, plain) < SMALLEST_P, "the plain law would pass"
        services.wait_idle()
