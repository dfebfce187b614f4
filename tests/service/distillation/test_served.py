"""A target that is served as the teacher: what it tells, and how it may be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.client.blocking import Client
from tandem.distillation import run, teachers
from tandem.distillation.drafters import read_model, read_tokenizer
from tandem.distillation.plan import Distillation
from tandem.distillation.run import TrainingProgress, distill
from tandem.distillation.teachers import LocalTeacher, ServedTeacher
from tandem.errors import StartupError, Unavailable
from tandem.rpc.server import RunningServer
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, start
from tests.support.distilling import VOCABULARY, small_plan
from tests.support.processes.ports import free_port
from tests.support.waiting import HANG_SECONDS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Distillation:
    return small_plan(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.distillation.training_texts._BLOCK", 8)
    monkeypatch.setattr("tandem.distillation.training_texts._AT_ONCE", 8)
    monkeypatch.setattr("tandem.distillation.held_out._ROWS", 2)
    monkeypatch.setattr("tandem.distillation.held_out._DRAFTS", 1)
    monkeypatch.setattr(teachers, "_PAUSE_SECONDS", 0.05)


class Serving:
    """A target, and an orchestrator that comes and goes at one port."""

    def __init__(self, target: str) -> None:
        self.port = free_port()
        self._target = target
        self._server: RunningServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def come(self) -> None:
        settings = OrchestratorSettings(targets=(self._target,), drafters=())
        self._server = RunningServer(self.address, make_orchestrator(settings))
        await self._server.start()
        await self._server.ready()

    async def go(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
            self._server = None


@pytest.fixture
async def serving(plan: Distillation) -> AsyncIterator[Serving]:
    async with AsyncExitStack() as stack:
        settings = TargetSettings(model=plan.target, dtype="float32", max_sequences=16)
        found = Serving(address_of(await start(stack, make_target(settings))))
        await found.come()
        stack.push_async_callback(found.go)
        yield found


async def test_a_service_tells_what_its_checkpoint_does(
    plan: Distillation, serving: Serving
) -> None:
    tokenizer = read_tokenizer(plan.drafter)
    local = LocalTeacher(read_model(plan.target, torch.float32, CPU), CPU)
    tokens = torch.randint(1, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
    known = torch.tensor([2, 5, 11])

    def ask() -> tuple[Any, tuple[torch.Tensor, Any]]:
        with Client(serving.address) as client:
            teacher = ServedTeacher(client, tokenizer)
            assert teacher.vocabulary == VOCABULARY
            return teacher.rows(tokens), teacher.continued(tokens, known, VOCABULARY, 3)

    rows, (written, said) = await asyncio.to_thread(ask)
    values, ids = local.rows(tokens).log_probs.topk(20)
    assert rows.ids.shape == (3, 10, 20)
    assert torch.equal(rows.ids[..., 0], ids[..., 0])
    assert torch.allclose(rows.log_probs, values, atol=1e-4)
    assert torch.equal(written[2], tokens[2])
    whole = local.rows(written).log_probs.topk(20)
    for row, size in enumerate((2, 5)):
        assert torch.allclose(said.log_probs[row, size - 1 :], whole[0][row, size - 1 :], atol=1e-4)
        assert torch.equal(said.ids[row, size - 1 :, 0], whole[1][row, size - 1 :, 0])
    for row, size in enumerate(known.tolist()):
        assert torch.equal(written[row, :size], tokens[row, :size])
    assert len(set(written[0].tolist())) > 3


async def test_a_drafter_learns_from_a_service(
    plan: Distillation, serving: Serving, tmp_path: Path
) -> None:
    served = replace(plan, target=serving.address, steps=10, rate=5e-3, measure_every=5)
    outcome = await asyncio.to_thread(distill, served, tmp_path / "out")
    means = [figures["target"].summary()["overlap"] for figures in (outcome.first, outcome.best)]
    assert means[1] > means[0]
    for before, after in outcome.tokens_a_round.values():
        assert all(1 <= each <= 5 for each in (*before, *after))


async def test_a_service_that_dies_is_waited_for(
    plan: Distillation, serving: Serving, tmp_path: Path
) -> None:
    served = replace(plan, target=serving.address, data="corpus", steps=4)
    loop = asyncio.get_running_loop()
    said: list[str] = []

    def on_loop(what: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(what(), loop).result(HANG_SECONDS)

    def say(sentence: str) -> None:
        if sentence.startswith("the target is away ("):
            on_loop(serving.come)
        said.append(sentence)

    def progress(now: TrainingProgress) -> None:
        if now.step == 1:
            on_loop(serving.go)

    def train() -> Any:
        client = Client(serving.address, resume_seconds=0.0)
        return distill(served, tmp_path / "out", client=client, say=say, progress=progress)

    outcome = await asyncio.to_thread(train)
    assert outcome.steps == 4
    assert sum(sentence.startswith("the target is away (") for sentence in said) == 1


async def test_a_service_that_stays_away_ends_the_run_which_goes_on(
    plan: Distillation, serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = replace(plan, target=serving.address, data="corpus", steps=4)
    loop = asyncio.get_running_loop()

    class Impatient(ServedTeacher):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._wait_seconds = 0.1

    def progress(now: TrainingProgress) -> None:
        if now.step == 2:
            asyncio.run_coroutine_threadsafe(serving.go(), loop).result(HANG_SECONDS)

    def train(**options: Any) -> Any:
        client = Client(serving.address, resume_seconds=0.0)
        return distill(served, tmp_path / "out", client=client, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run, "ServedTeacher", Impatient)
        with pytest.raises(Unavailable, match=r"away for 0.1 s .*the same command goes on"):
            await asyncio.to_thread(train, progress=progress)
    with pytest.raises(StartupError, match="no target serves there"):
        await asyncio.to_thread(train)
    await serving.come()
    steps: list[int] = []
    await asyncio.to_thread(train, progress=lambda now: steps.append(now.step))
    assert steps == [3, 4]


async def test_a_service_of_another_tokenizer_is_refused(
    embedded_pair: tuple[Path, Path], random_pair: tuple[Path, Path]
) -> None:
    async with AsyncExitStack() as stack:
        settings = TargetSettings(model=str(random_pair[1]))
        found = Serving(address_of(await start(stack, make_target(settings))))
        await found.come()
        stack.push_async_callback(found.go)

        def ask() -> None:
            with Client(found.address) as client:
                ServedTeacher(client, read_tokenizer(str(embedded_pair[0])))

        with pytest.raises(StartupError, match="another tokenizer than the drafter"):
            await asyncio.to_thread(ask)
