"""The pair of models in the repository, served by three processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import grpc
import numpy as np
import pytest
from rich.console import Console

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tests.support.models.greedy import (
    VERIFIERS,
    Reference,
    references,
    source_lines,
    texts_of,
)
from tests.support.processes.services import Trio, generation, trio

PROMPT = "import os\n\n\ndef "


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with trio(tmp_path_factory.mktemp("logs")) as services:
        yield services


@pytest.fixture(scope="module")
def greedy() -> list[Reference]:
    return references(source_lines(8), 48)


@pytest.mark.parametrize(
    ("verifier", "gamma"), [*product(VERIFIERS, (4,)), *product(("block",), (0, 1, 8))]
)
def test_greedy_equals_transformers(
    services: Trio, greedy: list[Reference], verifier: str, gamma: int
) -> None:
    address = services.orchestrator.address
    texts = asyncio.run(texts_of(address, greedy, 48, verifier, gamma))
    for reference, text in zip(greedy, texts, strict=True):
        assert reference.difference(text) is None
        if reference.near_tie(text):
            Console().print(f"near-tie: {verifier}, gamma {gamma}, {reference.prompt}")


def complete_together(address: str, messages: list[pb.Generation]) -> list[pb.CompleteResponse]:
    async def run() -> list[pb.CompleteResponse]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            calls = [stub.Complete(pb.CompleteRequest(generation=m)) for m in messages]
            return await asyncio.gather(*calls)

    return asyncio.run(run())


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_same_seed_gives_the_same_text(services: Trio, verifier: str) -> None:
    """Alone, beside three others, and in a second run. Seed 0 is a seed."""
    address = services.orchestrator.address
    messages = [
        generation(PROMPT, max_new_tokens=40, seed=seed, gamma=4, verifier=verifier)
        for seed in range(4)
    ]
    (alone,) = complete_together(address, messages[:1])
    beside = complete_together(address, messages)
    (again,) = complete_together(address, messages[:1])
    assert alone.token_ids == beside[0].token_ids == again.token_ids
    assert alone.text == again.text
    assert len({reply.text for reply in beside}) > 1


def test_one_target_pass_a_round_and_only_new_tokens_are_fed(services: Trio) -> None:
    before_drafter, before_target = (info.stats for info in services.stats())
    with services.client() as stub:
        message = generation(PROMPT, max_new_tokens=60, seed=3, gamma=4)
        summary = stub.Complete(pb.CompleteRequest(generation=message)).summary
    services.wait_idle()
    after_drafter, after_target = (info.stats for info in services.stats())
    passes = after_target.forward_passes - before_target.forward_passes
    fed = after_target.fed_tokens - before_target.fed_tokens
    drafted = sum(summary.gammas)
    assert passes == summary.rounds
    assert fed == summary.prompt_tokens + (summary.rounds - 1) + drafted
    passes = after_drafter.forward_passes - before_drafter.forward_passes
    fed = after_drafter.fed_tokens - before_drafter.fed_tokens
    assert passes == 1 + drafted
    # Each emitted token once, each drafted one but a round's last; kept ones are not fed again.
    assert fed <= summary.prompt_tokens + summary.new_tokens + drafted


def test_the_text_is_what_the_tokens_decode_to(
    services: Trio, embedded_pair: tuple[Path, Path]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_pair[1] / "tokenizer.json"))
    with services.client() as stub:
        for seed in range(2):
            message = generation(PROMPT, max_new_tokens=60, seed=seed)
            reply = stub.Complete(pb.CompleteRequest(generation=message))
            decoded = tokenizer.decode(list(reply.token_ids), skip_special_tokens=True)
            assert reply.text == decoded.removesuffix("\ufffd")


def test_stop_strings_end_the_text(services: Trio) -> None:
    with services.client() as stub:
        plain = generation("def add(a, b):\n    return", max_new_tokens=60, temperature=0)
        text = stub.Complete(pb.CompleteRequest(generation=plain)).text
        stop = text[10:13]
        plain.stopping.stop_strings.append(stop)
        reply = stub.Complete(pb.CompleteRequest(generation=plain))
    assert reply.text == text[: text.index(stop)]
    assert reply.summary.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert reply.summary.stop_string == stop


def test_a_drafter_that_is_the_target(tmp_path: Path, embedded_pair: tuple[Path, Path]) -> None:
    """At temperature 0 every draft is kept. At 1, as many as the recorded overlaps say:
    accepted - Σ min(p, q) has mean 0 under the token rule, whatever was truncated."""
    settings = {"MODEL": str(embedded_pair[1])}
    with trio(tmp_path, drafter=settings, target=settings) as services:
        address = services.orchestrator.address
        (greedy,) = complete_together(
            address, [generation(PROMPT, max_new_tokens=41, temperature=0, gamma=4)]
        )
        assert greedy.summary.acceptance_rate == 1
        assert list(greedy.summary.gammas) == [0] + [4] * 8
        messages = [
            generation(PROMPT, max_new_tokens=60, seed=seed, gamma=4, verifier="token")
            for seed in range(8)
        ]
        summaries = [reply.summary for reply in complete_together(address, messages)]
    excess = np.array([s.accepted_tokens - s.overlap_sum for s in summaries])
    standard_error = excess.std(ddof=1) * np.sqrt(len(excess))
    assert abs(excess.sum()) < 4 * standard_error
    assert sum(s.overlap_sum for s in summaries) / sum(s.overlap_positions for s in summaries) > 0.9
