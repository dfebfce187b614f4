"""Chats after one system prompt, over replicas of a target as processes: each chat finds its own
prefix, also where a replica is killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

import tandem
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.local.process import ServiceProcess
from tests.support.processes.services import is_serving
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

CHATS, TURNS, AT_ONCE = 50, 6, 6
SYSTEM, QUESTION, ANSWER = 512, 48, 16
MODEL = ROOT / "models" / "target"
TARGET = {
    "MODEL": str(MODEL),
    "MAX_LENGTH": "2048",
    "CACHE_TOKENS": "60000",
    "ENGINE": "torch",
    "DTYPE": "float32",
    "THREADS": "1",
}


def service(module: str, prefix: str, settings: dict[str, str], logs: Path) -> ServiceProcess:
    own = {"LISTEN": "127.0.0.1:0", "LOG_FORMAT": "json", **settings}
    environment = {f"TANDEM_{prefix}_{name}": value for name, value in own.items()}
    process = ServiceProcess(module, module, "127.0.0.1", environment, logs / f"{module}.log")
    wait_until(lambda: process.port is not None)
    return process


@contextmanager
def replicas(count: int, logs: Path) -> Iterator[tuple[str, list[ServiceProcess]]]:
    """An orchestrator's address, and its targets; without a drafter."""
    running: list[ServiceProcess] = []
    try:
        for _ in range(count):
            running.append(service("target_svc", "TARGET", TARGET, logs))
        targets = ",".join(process.address for process in running)
        front = service("orchestrator", "ORCHESTRATOR", {"DRAFTERS": "", "TARGETS": targets}, logs)
        running.append(front)
        name = "tandem.orchestrator.v1.OrchestratorService"
        wait_until(lambda: is_serving(front.address, name))
        yield front.address, running[:-1]
    finally:
        for process in running:
            process.kill()


@dataclass
class Written:
    """Answers by chat and turn, tokens of all prompts, and those that were found computed."""

    answers: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    @property
    def share(self) -> float:
        return sum(self.found) / sum(self.asked)


def written(address: str, ids: list[int], kill: ServiceProcess | None = None) -> Written:
    """All chats; a replica is killed half-way."""
    done = Written()

    def chat(number: int) -> None:
        numbers, tokens = random.Random(number), ids[:SYSTEM]
        for turn in range(TURNS):
            at = numbers.randrange(len(ids) - QUESTION)
            tokens += ids[at : at + QUESTION]
            text = client.generate(tokens, max_new_tokens=ANSWER, temperature=0.0, ignore_eos=True)
            done.answers[number, turn] = tuple(text.token_ids)
            done.asked.append(len(tokens))
            done.found.append(text.summary.cached_tokens)
            if kill is not None and len(done.asked) == CHATS * TURNS // 2:
                kill.kill()
            tokens += text.token_ids

    with tandem.Client(address) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(chat, range(CHATS)))
    return done


def opened(target: ServiceProcess) -> int:
    """Sequences that a target opened."""
    with grpc.insecure_channel(target.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        return stub.GetModelInfo(target_pb2.GetModelInfoRequest()).stats.opened_sequences


@pytest.mark.campaign(
    "chats after one system prompt find their prefixes at two replicas as at one, and go on"
    " where a replica is killed",
    "routing by prefixes over many fake replicas (unit/orchestrator/pool/test_prefixes.py,"
    " service/replicas/test_prefixes.py)",
)
def test_chats_stay_where_their_prefix_is(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode(Path(random.__file__).read_text()).ids
    with replicas(1, tmp_path) as (address, _):
        alone = written(address, ids)
    with replicas(2, tmp_path) as (address, targets):
        two = written(address, ids)
        counts = [opened(target) for target in targets]
    with replicas(2, tmp_path) as (address, targets):
        killed = written(address, ids, targets[1])
    assert len(alone.answers) == CHATS * TURNS
    assert alone.share > 0.85
    assert two.answers == killed.answers == alone.answers
    assert two.share >= 0.9 * alone.share
    assert max(counts) <= 1.3 * CHATS * TURNS / 2
