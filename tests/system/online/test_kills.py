"""A drafter that learns, as processes: what is killed, and when."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.numpy import load_file

from tandem.drafter.v1 import learning_pb2, learning_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.models.heads import is_head, save_blank_head
from tests.support.models.tiny import noisy
from tests.support.processes.services import Trio, generation, trio
from tests.support.waiting import wait_until

# A dozen of them are held out; eight have to be.
_TEXTS = 112
_KILLS, _KILLS_OF_A_HEAD, _WRITERS = 200, 20, 3
# Changes of weights after which a drafter has little left to gain.
_UPDATES = 2


HEADS = pytest.mark.campaign(
    "a head's trainer, as a process, learns and ends with its drafter",
    "a decoder's (this file); service/online/test_heads.py: heads, with steps made by the test",
)


@contextmanager
def learning(folder: Path, pair: tuple[Path, Path], method: str = "model") -> Iterator[Trio]:
    drafter = {
        "MODEL": str(pair[0]),
        "ONLINE": "60",
        "ONLINE_FOLDER": str(folder / "state"),
        "ADMIN_LISTEN": "127.0.0.1:0",
        "METHOD": method,
    }
    target = {"MODEL": str(pair[1])}
    if is_head(method):
        drafter["TARGET"], target["FEEDBACK"] = target["MODEL"], "last"
    with trio(folder, drafter=drafter, target=target) as found:
        yield found


def status(services: Trio) -> learning_pb2.GetLearningResponse:
    address = services.stack.further_addresses("ADMIN_LISTEN")["drafter"]
    with grpc.insecure_channel(address) as channel:
        stub = learning_pb2_grpc.LearningServiceStub(channel)
        return stub.GetLearning(learning_pb2.GetLearningRequest(), timeout=30)


def trainers(folder: Path) -> list[int]:
    """Processes that train for a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if b"tandem.online" in command and str(folder).encode() in command:
                    found.append(int(entry.name))
    return found


def gone(pid: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{pid}").exists()


def readable(folder: Path) -> int:
    """The version of a state, whose weights are whole."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return 0
    if state["weights"]:
        assert load_file(folder / "weights" / state["weights"])
    for path in (folder / "replay").glob("*.safetensors"):
        with suppress(FileNotFoundError):  # it was too old
            load_file(path)
    return int(state["version"])


def text(services: Trio, seed: int, nodes: int = 0) -> pb.CompleteResponse:
    message = generation([1 + seed % 4, 2], max_new_tokens=40, gamma=4)
    message.sampling.seed = seed
    if nodes:
        message.speculation.max_nodes = nodes
    with services.client() as stub:
        return stub.Complete(pb.CompleteRequest(generation=message), timeout=60)


@pytest.mark.parametrize(
    "method", ["model", *(pytest.param(name, marks=HEADS) for name in ("medusa", "hydra", "eagle"))]
)
def test_a_trainer_learns_and_ends_with_its_drafter(
    method: str, near_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, nodes = tmp_path / "state", 8 if is_head(method) else 0
    pair = near_pair
    if nodes:
        pair = save_blank_head(tmp_path / "head", method, near_pair[1]), near_pair[1]
    with learning(tmp_path, pair, method) as services:
        # Seeds and draft lengths are given, so these are the same texts each time.
        for seed in range(_TEXTS):
            assert not text(services, seed, nodes).summary.drafter_lost
        wait_until(lambda: status(services).held_texts == _TEXTS)
        wait_until(lambda: status(services).steps >= 25)
        told = status(services)
        assert told.training
        assert 0 < told.overlap.served <= 1
        assert not told.problem
        (pid,) = trainers(folder)
        os.kill(services.drafter.id, signal.SIGKILL)
        wait_until(gone(pid))
    readable(folder)


@pytest.fixture(scope="module")
def pair(random_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A drafter that has much to gain."""
    folder = tmp_path_factory.mktemp("further")
    noisy(random_pair[1], 0.7, 1).save_pretrained(folder)
    return folder, random_pair[1]


def anew(services: Trio) -> int:
    """Forget what was learnt, so that there is something to gain; the version from then on."""
    address = services.stack.further_addresses("ADMIN_LISTEN")["drafter"]

    def forgotten() -> int:
        with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
            stub = learning_pb2_grpc.LearningServiceStub(channel)
            reply = stub.ResetLearning(learning_pb2.ResetLearningRequest(), timeout=30)
            return int(reply.weights_version)
        return 0  # it still chooses what computes its passes

    return int(wait_until(forgotten))


@pytest.mark.campaign(
    "A state on disk that is whole whenever its processes are killed",
    "tests/unit/online/test_state.py, test_a_trainer_learns_and_ends_with_its_drafter",
)
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("method", ["model", "eagle"])
def test_kills_at_any_moment_break_nothing(
    method: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of trainer and drafter in turn, under texts: half of them while new weights are written,
    taken, or just served, the others at any moment."""
    folder, numbers = tmp_path / "state", random.Random(1)
    stopping, seeds, nodes = threading.Event(), iter(range(1 << 30)), 0
    kills = _KILLS
    if is_head(method):
        pair = save_blank_head(tmp_path / "head", method, pair[1]), pair[1]
        kills, nodes = _KILLS_OF_A_HEAD, 8
    with learning(tmp_path, pair, method) as services:

        def write() -> None:
            while not stopping.is_set():
                assert text(services, next(seeds), nodes).summary.new_tokens == 40

        def offered(than: int) -> Callable[[], bool]:
            """Whether something is offered that was not there before, or was taken."""
            left = set((folder / "offers").glob("*"))  # of a trainer that was killed
            return lambda: (
                bool(set((folder / "offers").glob("*")) - left) or readable(folder) > than
            )

        before, updates, begun = 0, 0, 0
        with ThreadPoolExecutor(_WRITERS) as pool:
            writing = [pool.submit(write) for _ in range(_WRITERS)]
            try:
                for kill in range(kills):
                    (pid,) = wait_until(lambda: trainers(folder))
                    if kill % 4 < 2:
                        wait_until(offered(before))
                        time.sleep(numbers.uniform(0, 0.1))
                    else:
                        time.sleep(numbers.uniform(0, 6))
                    for each in writing:
                        assert not each.done(), each.result()
                    if kill % 2:
                        os.kill(services.drafter.id, signal.SIGKILL)
                        wait_until(lambda: services.drafter.exit_code is not None)
                        version = readable(folder)
                        wait_until(gone(pid))
                        services.stack.restart("drafter")
                    else:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                        version = readable(folder)
                    assert version >= before
                    updates += version - before
                    before = version
                    if before >= begun + _UPDATES:
                        before = begun = anew(services)
            finally:
                stopping.set()
            for each in writing:
                each.result()
        assert text(services, 0, nodes).summary.new_tokens == 40
    assert updates >= kills // 8, "few weights changed, and so little was tried"
