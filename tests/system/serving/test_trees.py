"""Trees through three processes and real sockets: the law, greedy texts, and their counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair
from tests.exactness import (
    BRANCHING,
    PATIENT,
    RULES,
    SMALLEST_P,
    Case,
    count_texts,
    drafter_settings,
    target_law,
    target_settings,
)
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.heads import is_head
from tests.support.models.tiny import save_random_llama
from tests.support.processes.services import generation, trio
from tests.support.repository import ROOT

OTHERS = pytest.mark.campaign(
    "the law and greedy texts of trees, chains and forests through sockets",
    "greedy texts of `tree` (this file); the law of `tree` inside the target (test_inside_law.py),"
    " of `lookahead` (service/recipes/test_predicted.py); the enumeration of each",
)

# The mutant's p-value is 4e-9 at as many.
TEXTS = 1_000


@pytest.fixture(scope="module")
def folder(random_pair: tuple[Path, Path]) -> Path:
    """With two drafters and a target."""
    folder = random_pair[0].parent
    save_random_llama(folder / "second", 3)
    return folder


# By drafting method, the rules of its drafts; None leaves the sizes of `block` open, so that they
# follow what was seen of other texts. `make exactness` has both kinds of rows of each.
@pytest.mark.parametrize(
    ("method", "rules"),
    [
        pytest.param("tree", [None], id="tree, sizes left open", marks=OTHERS),
        *(pytest.param(n, RULES[n], id=n, marks=OTHERS) for n in BRANCHING),
    ],
)
def test_the_law_is_the_targets(
    method: str, rules: Sequence[str | None], folder: Path, tmp_path: Path
) -> None:
    rows = "dense" if method == "chains" else "support 2"
    target = folder / "target"
    law = target_law(target)
    settings = drafter_settings(method, rows, folder)
    with trio(
        tmp_path,
        drafter=settings,
        target=target_settings(method, folder),
        orchestrator=PATIENT,
    ) as services:
        for rule in rules:
            open_sizes = Case("block", None, rows, drafter=method)
            case = Case(rule, 3, rows, 6, method) if rule else open_sizes
            counts = count_texts(services, case, range(TEXTS))
            assert chi_square_p_value(counts, law) > SMALLEST_P, case
        services.wait_idle()


@pytest.mark.campaign(
    "a wrong tree rule is noticed through sockets",
    "tests/support/laws/trees/mutants.py must fail the enumeration",
)
def test_a_mutant_server_fails(folder: Path, tmp_path: Path) -> None:
    target = folder / "target"
    with trio(
        tmp_path,
        drafter=drafter_settings("tree", "dense", folder),
        target={"MODEL": str(target)},
        orchestrator=PATIENT,
        target_module="tests.system.serving.mutant_tree",
    ) as services:
        counts = count_texts(services, Case("token", 3, "dense", 6, "tree"), range(TEXTS))
    assert chi_square_p_value(counts, target_law(target)) < SMALLEST_P


# Depths with budgets.
SIZES = ((4, 16), (3, 6), (2, 2))


@pytest.mark.parametrize(
    "recipe",
    ["tree", *(pytest.param(name, marks=OTHERS) for name in BRANCHING[1:])],
)
def test_greedy_texts_and_counts(recipe: str, tmp_path: Path) -> None:
    """With the embedded pair: what is drafted, what is kept, and what is said of it."""
    sizes = SIZES if recipe == "tree" else SIZES[:1]
    prompts = ["def main(", "# "]
    settings: dict[str, dict[str, str]] = {"drafter": {"RECIPE": recipe}, "target": {}}
    settings["drafter"]["LOOKAHEAD_CANDIDATES"] = "4"  # of four tokens each
    if is_head(recipe):
        if not (ROOT / "models" / recipe).is_dir():
            pytest.skip(
                f"there is no embedded head: python -m models.zoo.heads.{recipe} all trains it"
            )
        settings = Pair(recipe=recipe).settings()
    with trio(tmp_path, drafter=settings["drafter"], target=settings["target"]) as services:
        with grpc.insecure_channel(services.orchestrator.address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

            def complete(
                prompt: str, gamma: int | None, nodes: int | None, verifier: str
            ) -> pb.Summary:
                asked = generation(
                    prompt,
                    max_new_tokens=48,
                    temperature=0,
                    gamma=gamma,
                    max_nodes=nodes,
                    verifier=verifier,
                )
                reply = stub.Complete(pb.CompleteRequest(generation=asked), timeout=60)
                texts.append(list(reply.token_ids))
                return reply.summary

            for prompt in prompts:
                texts: list[list[int]] = []
                complete(prompt, 0, None, "block")
                for verifier in RULES[recipe]:
                    for gamma, nodes in sizes if verifier == "block" else sizes[:1]:
                        summary = complete(prompt, gamma, nodes, verifier)
                        assert not summary.drafter_lost
                        assert max(summary.nodes) <= nodes
                        assert max(summary.gammas) <= gamma
                        assert summary.drafted_tokens == sum(summary.nodes)
                        assert summary.effective.speculation.max_nodes == nodes
                        assert len(summary.accepted_per_position) <= gamma
                        assert sum(summary.accepted_per_rank) == summary.accepted_tokens
                complete(prompt, None, None, "block")
                assert all(text == texts[0] for text in texts[1:]), prompt
            with pytest.raises(grpc.RpcError, match=r"max_nodes must be 1\.\.16, got 17"):
                complete("x", 4, 17, "block")
            with pytest.raises(grpc.RpcError, match="verifier 'greedy_block' is unknown"):
                complete("x", 4, 8, "greedy_block")
        services.wait_idle()
