"""What runs compute in vain: rounds after a stop string, and texts whose clients leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.target.v1 import target_pb2
from tandem.target.v1.target_pb2_grpc import TargetServiceStub
from tests.support.processes.services import Trio, generation, trio
from tests.support.waiting import wait_until

pytestmark = pytest.mark.campaign(
    "a text that ends in a run wastes two rounds at most on average; nothing is open after "
    "500 clients left",
    "service/streams/test_runs.py, service/inside: `close` ends a run between two rounds",
)
TEXTS, CANCELS = 40, 500
PROMPTS = ("import ", "def main(", "for i in ", "class A")


def passes(services: Trio) -> int:
    """Of the target so far."""
    with services.channel("target") as channel:
        info = TargetServiceStub(channel).GetModelInfo(target_pb2.GetModelInfoRequest())
        return int(info.stats.forward_passes)


def open_sequences(services: Trio) -> int:
    with services.channel("target") as channel:
        info = TargetServiceStub(channel).GetModelInfo(target_pb2.GetModelInfoRequest())
        return int(info.stats.open_sequences)


def test_few_rounds_are_computed_behind_a_stop_string(tmp_path: Path) -> None:
    """The target does not know of it: `close` ends the run, two rounds later in the mean."""
    with trio(tmp_path, drafter={}, inside=True, target={"DRAFTS": "lookup"}) as services:
        before, rounds = passes(services), 0
        with services.client() as stub:
            for seed in range(TEXTS):
                prompt = PROMPTS[seed % len(PROMPTS)]
                message = generation(prompt, max_new_tokens=200, seed=seed, gamma=seed % 2 * 3)
                message.stopping.stop_strings.append("e")
                summary = stub.Complete(pb.CompleteRequest(generation=message)).summary
                rounds += summary.rounds  # the prefill is one
        wait_until(lambda: open_sequences(services) == 0)
        wasted = passes(services) - before - rounds
    assert 0 <= wasted <= 2 * TEXTS


def test_clients_that_leave_in_mid_run_leave_nothing_open(tmp_path: Path) -> None:
    with (
        trio(tmp_path, drafter={}, inside=True, target={"DRAFTS": "model"}) as services,
        services.client() as stub,
    ):
        for seed in range(CANCELS):
            message = generation("def ", max_new_tokens=1000, seed=seed, gamma=3)
            call = stub.Generate(pb.GenerateRequest(generation=message))
            for _ in range(1 + seed % 5):
                next(call)
            call.cancel()
        wait_until(lambda: open_sequences(services) == 0)
