"""A client whose orchestrator is lost in the middle of a text goes on, there or elsewhere."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer, models

from tandem.load.client import Lost
from tandem.load.resuming import Resuming
from tandem.local.process import ServiceProcess
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.faults.fleet import free_port
from tests.processes import READY_SECONDS, ROOT, generation, is_serving
from tests.service.conftest import Stack, stack
from tests.service.fake_carrier import VOCAB_SIZE, FakeContext
from tests.service.fakes import FakeDrafter, FakeTarget, orchestrate, request, serve_fakes

__all__ = ["stack"]  # a fixture of other tests

TOKENS = 120
# Words of two letters, so that a stop string may begin in one and end in the next.
WORDS = {f"{chr(97 + number // 26)}{chr(97 + number % 26)}": number for number in range(VOCAB_SIZE)}


def speaking_target(rounds: list[int]) -> FakeTarget:
    """One that counts up to 50 in two letters, slowly enough to be interrupted; it notes rounds."""
    target = FakeTarget(wraps=50)
    target.tokenizer_json = Tokenizer(models.WordLevel(WORDS, unk_token="aa")).to_str().encode()

    async def pause(round_: int | None, context: FakeContext) -> None:
        if round_ is not None:
            rounds.append(round_)
        await asyncio.sleep(0.003)

    target.interfere = pause
    return target


class Front:
    """Orchestrator processes over fakes, each at an address of its own.

    Attributes:
        addresses: theirs.
        rounds: that the target behind them has been asked for.
    """

    def __init__(self, places: dict[str, str], logs: Path) -> None:
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.rounds: list[int] = []
        self._places = places
        self._logs = logs
        self._running: dict[str, ServiceProcess] = {}

    def start(self, address: str) -> None:
        own = {**self._places, "LISTEN": address, "LOG_FORMAT": "json", "GAMMA": "4"}
        environment = {f"TANDEM_ORCHESTRATOR_{name}": value for name, value in own.items()}
        self._running[address] = ServiceProcess(
            "orchestrator",
            "orchestrator",
            "127.0.0.1",
            environment,
            self._logs / f"{address.replace(':', '-')}.log",
            root=ROOT,
        )

    def wait(self, address: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        process = self._running[address]
        while process.port is None or not is_serving(
            address, "tandem.orchestrator.v1.OrchestratorService"
        ):
            assert time.monotonic() < deadline, process.last_lines()
            time.sleep(0.05)

    def kill(self, address: str) -> None:
        self._running[address].kill()

    def end(self) -> None:
        for process in self._running.values():
            process.kill()


@asynccontextmanager
async def fronted(logs: Path, count: int = 1) -> AsyncIterator[Front]:
    """So many orchestrators, ready."""
    rounds: list[int] = []
    async with serve_fakes(FakeDrafter(), speaking_target(rounds)) as settings:
        places = {"DRAFTERS": settings.drafters[0], "TARGETS": settings.targets[0]}
        front = Front(places, logs)
        front.rounds = rounds
        try:
            for address in front.addresses[:count]:
                front.start(address)
            for address in front.addresses[:count]:
                await asyncio.to_thread(front.wait, address)
            yield front
        finally:
            front.end()


def asked(**changes: Any) -> pb.Generation:
    fields: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.0, "gamma": 4, "seed": 7}
    return generation("aa", **(fields | changes))


def ids_of(rounds: list[pb.Round]) -> list[int]:
    return [token.id for round_ in rounds for token in round_.tokens]


def text_of(rounds: list[pb.Round]) -> str:
    return "".join(token.text for round_ in rounds for token in round_.tokens)


def killed_midway(
    front: Front, wanted: pb.Generation, *, elsewhere: bool, after: int
) -> tuple[list[pb.Round], pb.Summary, list[str]]:
    """A text whose orchestrator is killed behind a round; it comes back, or another is there."""
    first = front.addresses[0]
    rounds: list[pb.Round] = []
    notes: list[str] = []
    summary = pb.Summary()
    addresses = front.addresses if elsewhere else [first]
    for reply in Resuming(addresses, READY_SECONDS, notes.append).generate(wanted):
        if reply.HasField("summary"):
            summary = reply.summary
            continue
        rounds.append(reply.round)
        if len(rounds) == after:
            front.kill(first)
            if not elsewhere:
                front.start(first)
    return rounds, summary, notes


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_text_at_temperature_0_is_the_fault_free_one(
    tmp_path: Path, elsewhere: bool
) -> None:
    async with fronted(tmp_path, 2 if elsewhere else 1) as front:
        wanted = asked()
        replies = Resuming(front.addresses[:1], 0.0).generate(wanted)
        expected = await asyncio.to_thread(
            lambda: [r.round for r in replies if r.HasField("round")]
        )
        rounds, summary, notes = await asyncio.to_thread(
            killed_midway, front, wanted, elsewhere=elsewhere, after=5
        )
    assert len(ids_of(expected)) == TOKENS
    assert ids_of(rounds) == ids_of(expected)
    assert text_of(rounds) == text_of(expected)
    numbers = [round_.round for round_ in rounds]
    assert numbers == sorted(set(numbers))
    assert (summary.new_tokens, summary.rounds) == (TOKENS, len(rounds))
    assert len(notes) == 1


async def test_the_command_does_so_by_itself_and_gives_up_in_time(tmp_path: Path) -> None:
    async with fronted(tmp_path) as front:
        address = front.addresses[0]
        command = [sys.executable, "-m", "tandem.cli", "generate", "aa", "--address", address]
        command += ["--temperature", "0", "--gamma", "4", "-n", "400"]
        whole = speaking_target([]).text(400, last=0)

        def interrupted(*options: str, back: bool) -> tuple[int, str, str]:
            run = subprocess.Popen(
                [*command, *options],
                bufsize=0,  # or what was read ahead is lost to the rest
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=ROOT,
            )
            assert run.stdout is not None
            first = run.stdout.read(6)
            front.kill(address)
            if back:
                front.start(address)
            rest, said = run.communicate(timeout=READY_SECONDS)
            return run.returncode, (first + rest).decode(), said.decode()

        code, text, said = await asyncio.to_thread(interrupted, back=True)
        assert (code, "".join(text.split())) == (0, "".join(list(WORDS)[i] for i in whole)), said
        assert "the orchestrator was lost" in said
        assert "400 tokens" in said
        await asyncio.to_thread(front.wait, address)
        code, text, said = await asyncio.to_thread(
            interrupted, "--resume-seconds", "0.3", back=False
        )
        assert code == 1
        assert "UNAVAILABLE" in said.splitlines()[-1]


async def test_one_json_object_goes_on_as_a_streamed_text_does(tmp_path: Path) -> None:
    async with fronted(tmp_path) as front:
        address = front.addresses[0]
        command = [sys.executable, "-m", "tandem.cli", "generate", "aa", "--address", address]
        command += ["--temperature", "0", "--gamma", "4", "-n", "400", "--json"]

        def finished(*, interrupted: bool) -> tuple[int, str, str]:
            run = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
            )
            if interrupted:
                seen = len(front.rounds)
                while len(front.rounds) < seen + 10:
                    assert run.poll() is None
                    time.sleep(0.005)
                front.kill(address)
                front.start(address)
            out, said = run.communicate(timeout=READY_SECONDS)
            return run.returncode, out, said

        code, out, said = await asyncio.to_thread(finished, interrupted=False)
        assert code == 0, said
        whole = json.loads(out)
        assert whole["token_ids"] == speaking_target([]).text(400, last=0)
        code, out, said = await asyncio.to_thread(finished, interrupted=True)
        assert code == 0, said
        assert "the orchestrator was lost" in said
        again = json.loads(out)
        assert (again["token_ids"], again["text"]) == (whole["token_ids"], whole["text"])
        assert again.keys() == whole.keys()
        assert again["summary"]["new_tokens"] == 400
        assert len(again["origins"]) == 400


async def test_a_sampled_text_is_the_fault_free_one_where_nothing_is_drafted(stack: Stack) -> None:
    """A round without a draft draws the same token from a prefill: its numbers are the round's."""
    fields: dict[str, Any] = {"max_new_tokens": 30, "gamma": 0, "seed": 11}
    whole = await _rounds(stack, generation([1, 2, 3], **fields))
    for cut in (1, 7, 29):
        wanted = generation([1, 2, 3], **fields)
        wanted.received_token_ids.extend(ids_of(whole[:cut]))
        wanted.first_round = whole[cut - 1].round + 1
        assert ids_of(await _rounds(stack, wanted)) == ids_of(whole[cut:])


async def _rounds(stack: Stack, wanted: pb.Generation) -> list[pb.Round]:
    replies = stack.orchestrator.Generate(pb.GenerateRequest(generation=wanted))
    return [reply.round async for reply in replies if reply.HasField("round")]


def received(count: int, **changes: Any) -> pb.CompleteRequest:
    """A text of the fakes, of which so many tokens came."""
    ids = FakeTarget().text(count)
    return request(**({"received_token_ids": ids, "first_round": 9} | changes))


async def test_all_that_came_counts_and_none_comes_again() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget()) as stub:
        reply = await stub.Complete(received(12))
        assert list(reply.token_ids) == FakeTarget().text(20)[12:]
        assert reply.summary.new_tokens == 8
        assert reply.summary.effective.first_round == 9


@pytest.mark.parametrize("cut", range(1, 6))
async def test_a_stop_string_across_the_break_ends_the_text(cut: int) -> None:
    """Its first half came before, and its text was held back."""
    async with orchestrate(FakeDrafter(), speaking_target([])) as stub:
        fields = {"stopping": {"max_new_tokens": 20, "stop_strings": ["f ag ah"]}}
        replies = stub.Generate(pb.GenerateRequest(generation=request(**fields).generation))
        tokens = [token async for reply in replies for token in reply.round.tokens]
        texts = [token.text for token in tokens]
        assert "".join(texts).split() == ["ac", "ad", "ae", "a"]
        ids = [token.id for token in tokens]
        assert len(ids) == 6 > cut
        rest = await stub.Complete(request(received_token_ids=ids[:cut], first_round=50, **fields))
        assert list(rest.token_ids) == ids[cut:]
        assert rest.summary.stop_string == "f ag ah"
        assert rest.text == "".join(texts[cut:])


async def test_a_text_that_is_over_already_has_its_summary_alone() -> None:
    """Its last round came, and its summary did not."""
    target = FakeTarget(eos_token_ids=[5])
    async with orchestrate(FakeDrafter(), target) as stub:
        for ids, reason in (
            (FakeTarget().text(20), pb.FINISH_REASON_LENGTH),
            (FakeTarget().text(4), pb.FINISH_REASON_EOS),
        ):
            ignore = {"max_new_tokens": 20, "ignore_eos": reason == pb.FINISH_REASON_LENGTH}
            reply = await stub.Complete(
                request(received_token_ids=ids, first_round=9, stopping=ignore)
            )
            assert not reply.token_ids
            assert reply.summary.finish_reason == reason
    assert target.opened == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"first_round": None}, "received_token_ids needs first_round"),
        ({"received_token_ids": [1] * 21}, "received_token_ids may hold 20 ids"),
        ({"received_token_ids": [100]}, "received_token_ids holds id 100"),
        ({"received_token_ids": [2, 5, 6]}, "the text ends with token 2 of them"),
        ({"speculation": {"verifier": "greedy_block", "gamma": 2}}, "cannot be resumed"),
    ],
)
async def test_what_cannot_have_come_is_refused(changes: dict[str, Any], sentence: str) -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(eos_token_ids=[5])) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as refused:
            await stub.Complete(received(3, **changes))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_nobody_who_was_never_there_is_waited_for() -> None:
    started = time.monotonic()
    with pytest.raises(Lost, match="no orchestrator answers"):
        next(Resuming([f"127.0.0.1:{free_port()}"], 60.0).generate(asked()))
    assert time.monotonic() - started < 30
