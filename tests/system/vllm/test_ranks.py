"""Several ranks of one model: what happens when one is missing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.inference.vllm.other_ranks import free_address
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.processes.services import generation, trio
from tests.support.repository import ROOT
from tests.support.waiting import until, wait_until
from tests.system.vllm.test_target import DRAFTER, LONG, MISSING, VLLM, texts_of

pytestmark = [
    pytest.mark.campaign(
        "a target by vLLM on several ranks and nodes, and lost ranks",
        "unit/inference/vllm: versions, arguments and what is refused",
    ),
    pytest.mark.skipif(find_spec("vllm") is None, reason=MISSING),
]
TEXTS, TOKENS = 6, 200


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for found in lists for child in found.read_text().split()]


def ranks_of(pid: int) -> list[int]:
    """Process ids of the other ranks of a target's model."""
    return [
        child
        for child in children_of(pid)
        if b"tandem.inference.vllm.rank" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


async def test_texts_of_a_replica_that_loses_a_rank_go_on_elsewhere(
    vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter, target = vllm_pair
    wanted = {"MODEL": str(target), **VLLM, "VLLM_TENSOR_PARALLEL": "2"}
    with trio(tmp_path, drafter={"MODEL": str(drafter), **DRAFTER}, target=wanted) as services:
        async with AsyncExitStack() as stack:
            plain = await start(stack, make_target(TargetSettings(model=str(target))))
            settings = OrchestratorSettings(
                drafters=(services.drafter.address,),
                targets=(services.target.address, address_of(plain)),
            )
            both = await start(stack, make_orchestrator(settings))
            await both.ready()
            channel = await connect(stack, address_of(both))
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

            def asked(seed: int) -> pb.Generation:
                # A lost round's number is not used again: only greedy texts stay the same.
                how: dict[str, Any] = {"gamma": 0 if seed % 2 else 4, "temperature": 0}
                return generation(LONG[seed:], max_new_tokens=TOKENS, **how)

            begun = asyncio.Semaphore(0)

            async def text(seed: int) -> list[int]:
                found: list[int] = []
                async for event in stub.Generate(pb.GenerateRequest(generation=asked(seed))):
                    if event.HasField("round"):
                        found += [token.id for token in event.round.tokens]
                        begun.release()
                return found

            pid = services.target.id
            texts = [asyncio.create_task(text(seed)) for seed in range(TEXTS)]
            for _ in range(TEXTS):
                await begun.acquire()
            (other,) = ranks_of(pid)
            os.kill(other, signal.SIGKILL)
            found = await asyncio.gather(*texts)

            async def ended() -> bool:
                return services.target.exit_code is not None

            await until(ended)
            assert services.target.exit_code == 1
            assert "rank 1 ended with exit code -9" in (tmp_path / "target.log").read_text()
            for seed, tokens in enumerate(found):
                reply = await stub.Complete(pb.CompleteRequest(generation=asked(seed)))
                assert tokens == list(reply.token_ids), seed


def test_a_model_of_two_nodes(vllm_pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter, target = vllm_pair
    nodes = {
        "MODEL": str(target),
        **VLLM,
        "VLLM_TENSOR_PARALLEL": "2",
        "VLLM_NODES": "2",
        "VLLM_LEADER": free_address(),
    }
    environment = {f"TANDEM_TARGET_{name}": value for name, value in nodes.items()}
    second = subprocess.Popen(
        [sys.executable, "-m", "target_svc"],
        cwd=ROOT,
        env={**os.environ, **environment, "TANDEM_TARGET_VLLM_NODE": "1"},
    )
    try:
        with trio(tmp_path, drafter={"MODEL": str(drafter), **DRAFTER}, target=nodes) as services:
            assert ranks_of(services.target.id) == []
            found = texts_of(services, range(4), LONG)
            services.wait_idle()
        # Node 0 has ended in order, and with it the others.
        assert second.wait(60) == 0
    finally:
        second.kill()
        second.wait()
    with trio(
        tmp_path, drafter={"MODEL": str(drafter), **DRAFTER}, target={"MODEL": str(target)}
    ) as services:
        assert texts_of(services, range(4), LONG) == found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_lost_ends_the_others(
    lost: int, vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {
        "LISTEN": "127.0.0.1:0",
        "MODEL": str(vllm_pair[1]),
        **VLLM,
        "VLLM_TENSOR_PARALLEL": "2",
        "VLLM_NODES": "2",
        "VLLM_LEADER": free_address(),
    }
    environment = {f"TANDEM_TARGET_{name}": value for name, value in settings.items()}
    nodes = []
    for number in (0, 1):
        with (tmp_path / f"{number}.log").open("w") as log:
            node = subprocess.Popen(
                [sys.executable, "-m", "target_svc"],
                cwd=ROOT,
                env={**os.environ, **environment, "TANDEM_TARGET_VLLM_NODE": str(number)},
                stderr=log,
            )
        nodes.append(node)
    try:
        wait_until(lambda: '"event": "ready"' in (tmp_path / "0.log").read_text())
        nodes[lost].kill()
        assert nodes[1 - lost].wait(60) == 1
        assert "is gone" in (tmp_path / f"{1 - lost}.log").read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def refused(**variables: str) -> str:
    """The line with which a target ends that cannot start."""
    environment = {
        **os.environ,
        "TANDEM_TARGET_LISTEN": "127.0.0.1:0",
        "TANDEM_TARGET_ENGINE": "vllm",
        "TANDEM_TARGET_VLLM_EAGER": "true",
        **{f"TANDEM_TARGET_{name}": value for name, value in variables.items()},
    }
    run = subprocess.run(
        [sys.executable, "-m", "target_svc"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2, run.stderr
    return run.stderr.strip().splitlines()[-1]


def test_heads_that_ranks_cannot_share() -> None:
    said = refused(MODEL="models/target", VLLM_TENSOR_PARALLEL="2")
    assert "vLLM" in said
    assert "must be divisible by tensor parallel size (2)" in said


def test_a_device_that_this_vllm_has_not(vllm_pair: tuple[Path, Path]) -> None:
    said = refused(MODEL=str(vllm_pair[1]), DEVICE="cuda")
    assert "cannot use the device 'cuda'" in said


def test_nodes_that_do_not_fit(vllm_pair: tuple[Path, Path]) -> None:
    said = refused(MODEL=str(vllm_pair[1]), VLLM_TENSOR_PARALLEL="3", VLLM_NODES="2")
    assert "TANDEM_TARGET_VLLM_NODES: 3 devices are not divided among 2 nodes" in said
    said = refused(MODEL=str(vllm_pair[1]), VLLM_TENSOR_PARALLEL="2", VLLM_NODES="2")
    assert "TANDEM_TARGET_VLLM_LEADER: several nodes need HOST:PORT" in said


def test_a_recipe_with_branches(vllm_pair: tuple[Path, Path]) -> None:
    said = refused(MODEL=str(vllm_pair[1]), DRAFTS="tree")
    assert "drafts trees, and this target takes chains alone" in said
