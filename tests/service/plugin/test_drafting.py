"""Texts of vLLM's, drafted by a drafter in another process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import NO_SHAPING, Grammar, GrammarKind, Shaping
from tandem.tools.local.process import ServiceProcess
from tandem_vllm.drafting import DraftAsk, DraftingThread
from tandem_vllm.settings import PluginSettings
from tandem_vllm.text import Opening, RemoteDraft
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.processes.fork_server import Forked
from tests.support.processes.ports import free_port
from tests.support.waiting import wait_until

PATIENT = {"wait_seconds": 60.0, "stage_floor_seconds": 60.0, "draft_seconds": 60.0}
PROMPT = [1, 2, 3]
GAMMA = 4


@contextmanager
def drafting(folder: Path, port: int) -> Iterator[ServiceProcess]:
    """A drafter, until the end or until somebody kills it."""
    settings = {"MODEL": str(folder), "LISTEN": f"127.0.0.1:{port}", "THREADS": "1"}
    own = {f"TANDEM_DRAFTER_{name}": value for name, value in settings.items()}
    start: Any = Forked
    process = ServiceProcess("drafter", "drafter_svc", "127.0.0.1", own, start=start)
    try:
        wait_until(lambda: process.port and serves(process))
        yield process
    finally:
        process.kill()


def told_by(drafter: ServiceProcess) -> drafter_pb2.GetModelInfoResponse:
    with grpc.insecure_channel(drafter.address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        return stub.GetModelInfo(drafter_pb2.GetModelInfoRequest(), wait_for_ready=True)


def serves(drafter: ServiceProcess) -> bool:
    with suppress(grpc.RpcError):
        return bool(told_by(drafter).info.model)
    return False


def open_sequences(drafter: ServiceProcess) -> int:
    return int(told_by(drafter).stats.open_sequences)


@contextmanager
def thread(
    port: int, vocab_size: int = VOCAB_SIZE, tokenizer: str = "", **settings: Any
) -> Iterator[DraftingThread]:
    own = PluginSettings(drafters=(f"127.0.0.1:{port}",), **{**PATIENT, **settings})
    target = common_pb2.ModelInfo(
        model="target", vocab_size=vocab_size, tokenizer_fingerprint=tokenizer, max_gamma=GAMMA
    )
    running = DraftingThread(own, target)
    try:
        yield running
    finally:
        running.close()


class Text:
    """One of vLLM's: whatever is drafted first is kept, and a token follows."""

    def __init__(
        self,
        running: DraftingThread,
        name: str,
        most_tokens: int = 500,
        shaping: Shaping = NO_SHAPING,
    ) -> None:
        self.name, self.tokens = name, list(PROMPT)
        self._running = running
        sampling = Sampling(seed=7, shaping=shaping)
        running.open([Opening(name, list(PROMPT), sampling, most_tokens)])

    def ask(self, *new: int) -> RemoteDraft | None:
        self.tokens += new
        return self._running.draft([DraftAsk(self.name, list(new), GAMMA)]).get(self.name)

    def drafted(self) -> RemoteDraft:
        """The next draft: a text goes on without, until its drafter is open. Each look costs it a
        token, so they become rare."""
        pause = 0.005
        while (found := self.ask(1)) is None:
            assert len(self.tokens) < 500, "it never came"
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return found


@pytest.fixture(scope="module")
def drafter(random_pair: tuple[Path, Path]) -> Iterator[ServiceProcess]:
    with drafting(random_pair[0], 0) as process:
        yield process


def port_of(process: ServiceProcess) -> int:
    assert process.port is not None
    return process.port


def test_drafts_come_with_their_rows(drafter: ServiceProcess) -> None:
    with thread(port_of(drafter)) as running:
        text = Text(running, "one")
        rounds = []
        for _ in range(3):
            found = text.drafted()
            rounds.append(found.round)
            assert found.seed == 7
            assert len(found.draft.token_ids) == GAMMA
            assert len(found.draft.sizes) == GAMMA
            assert sum(found.draft.sizes) == len(found.draft.ids) == len(found.draft.weights)
        assert rounds == sorted(set(rounds))


def test_texts_are_asked_for_together_and_left(drafter: ServiceProcess) -> None:
    with thread(port_of(drafter)) as running:
        texts = [Text(running, str(number)) for number in range(5)]
        for text in texts:
            text.drafted()
        assert open_sequences(drafter) == 5
        found = running.draft([DraftAsk(text.name, [2], GAMMA) for text in texts])
        assert set(found) == {text.name for text in texts}
        running.end([texts[0].name, texts[1].name, "never opened"])
        wait_until(lambda: open_sequences(drafter) == 3)
        assert texts[0].ask(1) is None
    wait_until(lambda: open_sequences(drafter) == 0)


def test_a_text_that_outgrows_what_it_reserved_opens_anew(drafter: ServiceProcess) -> None:
    with thread(port_of(drafter), reserve_tokens=6) as running:
        text = Text(running, "long")
        while len(text.tokens) < 60:
            text.drafted()
        wait_until(lambda: open_sequences(drafter) == 1)  # the one before is given up meanwhile


def test_a_text_is_drafted_up_to_its_end(drafter: ServiceProcess) -> None:
    with thread(port_of(drafter)) as running:
        text = Text(running, "short", most_tokens=40)
        text.drafted()
        while len(text.tokens) < len(PROMPT) + 38:
            text.ask(1)
        assert len(text.drafted().draft) == 1
        assert text.ask(1) is None


def test_texts_go_on_without_a_drafter_and_with_it_when_it_comes(
    random_pair: tuple[Path, Path],
) -> None:
    port = free_port()
    with thread(port) as running:
        text = Text(running, "patient")
        assert [text.ask(1) for _ in range(3)] == [None, None, None]
        with drafting(random_pair[0], port) as process:
            text.drafted()
            process.kill()
            wait_until(lambda: text.ask(1) is None)
        with drafting(random_pair[0], port):
            text.drafted()


def test_a_late_draft_is_not_waited_for_and_the_text_keeps_its_sequence(
    random_pair: tuple[Path, Path],
) -> None:
    port = free_port()
    with drafting(random_pair[0], port) as process, thread(port, wait_seconds=0.05) as running:
        late, other = Text(running, "late"), Text(running, "other")
        late.drafted()
        os.kill(process.id, signal.SIGSTOP)
        try:
            assert late.ask(1) is None
            # It is being drafted for still: nobody waits, and nothing is lost.
            assert [late.ask(1) for _ in range(20)] == [None] * 20
        finally:
            os.kill(process.id, signal.SIGCONT)
        late.drafted()
        other.drafted()
        assert open_sequences(process) == 2


def test_a_schema_that_no_drafter_reads_costs_no_drafts(embedded_pair: tuple[Path, Path]) -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "no such type"}')
    with drafting(embedded_pair[0], 0) as process:
        info = told_by(process).info
        with thread(port_of(process), info.vocab_size, info.tokenizer_fingerprint) as running:
            plain = Text(running, "plain")
            plain.drafted()
            Text(running, "odd", shaping=Shaping(grammar=schema)).drafted()
            assert plain.ask(1) is not None


def test_what_a_client_chooses_has_no_drafter_left_alone(drafter: ServiceProcess) -> None:
    """An id that is too long, and a token that no vocabulary has."""
    with thread(port_of(drafter)) as running:
        plain = Text(running, "plain")
        plain.drafted()
        Text(running, "x" * 500).drafted()
        strange = Text(running, "strange")
        running.open([Opening("strange", [1, VOCAB_SIZE], Sampling(seed=7), 100)])
        assert [strange.ask(1) for _ in range(5)] == [None] * 5
        assert plain.ask(1) is not None


def test_a_session_that_goes_on_has_numbers_of_its_own(drafter: ServiceProcess) -> None:
    with thread(port_of(drafter)) as running:
        seeds = [Text(running, "session").drafted().seed for _ in range(3)]
        assert len(set(seeds)) == 3
        wait_until(lambda: open_sequences(drafter) == 1)


def test_a_drafter_of_other_tokens_is_not_used(
    drafter: ServiceProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with thread(port_of(drafter), vocab_size=VOCAB_SIZE + 1) as running:
        text = Text(running, "foreign")
        assert [text.ask(1) for _ in range(5)] == [None] * 5
    assert open_sequences(drafter) == 0
