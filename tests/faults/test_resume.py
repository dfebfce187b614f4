"""A client that loses its orchestrator in mid-text resumes the text, at the same one or another."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.client.blocking import Client
from tandem.client.errors import Lost
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.faults.campaign.front import WORDS, Front, fronted, ids_of, speaking_target
from tests.support.processes.ports import free_port
from tests.support.processes.services import READY_SECONDS, generation
from tests.support.repository import ROOT

TOKENS = 120


def asked(**changes: Any) -> pb.Generation:
    fields: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.0, "gamma": 4, "seed": 7}
    return generation("aa", **(fields | changes))


def text_of(rounds: list[pb.Round]) -> str:
    return "".join(token.text for round_ in rounds for token in round_.tokens)


def killed_midway(
    front: Front, wanted: pb.Generation, *, elsewhere: bool, after: int
) -> tuple[list[pb.Round], pb.Summary, list[str]]:
    """A text whose orchestrator is killed after a round; it comes back, or another is there."""
    first = front.addresses[0]
    rounds: list[pb.Round] = []
    notes: list[str] = []
    summary = pb.Summary()
    addresses = front.addresses if elsewhere else [first]
    for reply in Client(*addresses, resume_seconds=READY_SECONDS, note=notes.append).events(wanted):
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
        replies = Client(front.addresses[0], resume_seconds=0.0).events(wanted)
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


@pytest.mark.campaign(
    "`tandem generate` continues a text whose orchestrator is killed",
    "the client that the command uses, with a killed orchestrator (this file)",
)
async def test_the_command_does_so_by_itself_and_gives_up_in_time(tmp_path: Path) -> None:
    async with fronted(tmp_path) as front:
        address = front.addresses[0]
        command = [sys.executable, "-m", "tandem.tools.cli", "generate", "aa", "--address", address]
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
        assert "the text broke off" in said
        assert "400 tokens" in said
        await asyncio.to_thread(front.wait, address)
        code, text, said = await asyncio.to_thread(
            interrupted, "--resume-seconds", "0.3", back=False
        )
        assert code == 1
        assert "UNAVAILABLE" in said.splitlines()[-1]


@pytest.mark.campaign(
    "`tandem generate` continues a text whose orchestrator is killed",
    "the client that the command uses, with a killed orchestrator (this file)",
)
async def test_one_json_object_goes_on_as_a_streamed_text_does(tmp_path: Path) -> None:
    async with fronted(tmp_path) as front:
        address = front.addresses[0]
        command = [sys.executable, "-m", "tandem.tools.cli", "generate", "aa", "--address", address]
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
        assert "the text broke off" in said
        again = json.loads(out)
        assert (again["token_ids"], again["text"]) == (whole["token_ids"], whole["text"])
        assert again.keys() == whole.keys()
        assert again["summary"]["new_tokens"] == 400
        assert len(again["origins"]) == 400


def test_nobody_who_was_never_there_is_waited_for() -> None:
    started = time.monotonic()
    with pytest.raises(Lost, match="no orchestrator answers"):
        next(Client(f"127.0.0.1:{free_port()}", resume_seconds=60.0).events(asked()))
    assert time.monotonic() - started < 30
