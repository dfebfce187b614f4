"""The command against an orchestrator that asks for a certificate and a token."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.front.service import make_service
from tandem.failure import Failure
from tandem.rpc.endpoint import Endpoint
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.tls import ClientTls, server_tls
from tandem.rpc.server import RunningServer
from tandem.tools.cli.main import app
from tandem.tools.load.ghz import tool as ghz
from tandem.tools.load.ghz.scenario import scenarios
from tests.support.cluster.manifests import tool
from tests.support.processes.authorities import Authority
from tests.support.wire.fakes import FakeDrafter, FakeTarget, serve_fakes

_TOKEN = secrets.token_hex(16)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """The address of an orchestrator; what callers need lies in the folder."""
    authority = Authority(folder)
    pair, _ = authority.sign("server"), authority.sign("me")
    (folder / "tokens").write_text(f"ann {_TOKEN}\n")
    (folder / "token").write_text(f"{_TOKEN}\n")
    (folder / "other").write_text(f"{_TOKEN[::-1]}\n")
    async with serve_fakes(FakeDrafter(), FakeTarget(), token_file=folder / "tokens") as settings:
        files = NamedFile("CERT", pair.cert), NamedFile("KEY", pair.key)
        tls = server_tls(*files, NamedFile("CA", authority.cert))
        server = RunningServer("127.0.0.1:0", make_service(settings), tls)
        await server.start()
        await server.ready()
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            await server.stop(1.0)


async def tandem(*words: str, **environment: str) -> tuple[int, str, str]:
    """A run of the command, beside the server: exit code, output, errors."""
    run = await asyncio.to_thread(
        CliRunner().invoke, app, words, env={"COLUMNS": "200", **environment}
    )
    return run.exit_code, run.stdout, run.stderr


async def test_commands_show_what_they_are_given(tmp_path: Path) -> None:
    files = {
        "--ca": "authority.pem",
        "--cert": "me.crt",
        "--key": "me.key",
        "--token-file": "token",
    }
    async with served(tmp_path) as address:
        known = [word for name, file in files.items() for word in (name, str(tmp_path / file))]
        text = ("generate", "--token-ids", "1", "-n", "8", "--json", "-a", address)
        code, out, errors = await tandem(*text, *known)
        assert (code, '"token_ids"' in out) == (0, True), errors
        environment = {
            f"TANDEM_{name.strip('-').replace('-', '_').upper()}": str(tmp_path / file)
            for name, file in files.items()
        }
        code, out, errors = await tandem("info", "-a", address, **environment)
        assert (code, "fake" in out) == (0, True), errors
        load = ("bench", "--texts", "4", "--warm-up", "0", "-a", address, "--json")
        code, out, errors = await tandem(*load, **environment)
        # The fake target has no tokenizer for the prompts; a refusal of theirs is past the door.
        assert "UNAUTHENTICATED" not in out + errors
        assert "no orchestrator answers" not in errors
        other = {**environment, "TANDEM_TOKEN_FILE": str(tmp_path / "other")}
        code, out, errors = await tandem(*text, **other)
        assert code == 1
        assert "the bearer token is unknown or was revoked" in errors
        assert _TOKEN[::-1] not in out + errors
        del environment["TANDEM_CERT"], environment["TANDEM_KEY"]
        code, out, errors = await tandem(*text, **environment)
        assert (code, "no orchestrator answers" in errors) == (1, True)


@pytest.mark.skipif(
    tool("ghz") is None, reason="ghz is not installed; deploy/ghz/fetch.sh builds it"
)
async def test_ghz_is_let_in_and_its_token_is_no_word_of_its_command(tmp_path: Path) -> None:
    config = {
        "insecure": True,
        "call": "tandem.orchestrator.v1.OrchestratorService.Complete",
        "data": {"generation": {"prompt_token_ids": [1], "stopping": {"max_new_tokens": 4}}},
        "total": 4,
        "concurrency": 1,
    }
    (tmp_path / "few.json").write_text(json.dumps(config))
    (scenario,) = scenarios(tmp_path, ["few"])
    named = {
        name: NamedFile(name, tmp_path / name) for name in ("authority.pem", "me.crt", "me.key")
    }
    async with served(tmp_path) as address:
        for token, status in ((_TOKEN, "OK"), (_TOKEN[::-1], None)):
            place = Endpoint(address, ClientTls(*named.values()), "server", token)
            run = partial(ghz.run, str(tool("ghz")), scenario, place, tmp_path / "report", {})
            if status is None:
                # It asks by reflection what it is to send, which needs a token as well.
                with pytest.raises(Failure):
                    await asyncio.to_thread(run)
            else:
                assert (await asyncio.to_thread(run)).statuses == {status: 4}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--ca", "{}/none.pem"), "--ca: {}/none.pem cannot be read: No such file"),
        (("--token-file", "{}/none"), "--token-file: {}/none cannot be read"),
        (("--cert", "x"), "--cert and --key go together"),
        (("--tls-name", "x"), "give --ca too"),
        (("--token-file", "{}/token", "-a", "10.0.0.1:50050"), "would go to 10.0.0.1:50050 with"),
    ],
)
async def test_what_does_not_go_is_said_in_a_line(
    words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{_TOKEN}\n")
    code, out, errors = await tandem("info", *(word.format(tmp_path) for word in words))
    assert (code, out) == (2, "")
    assert sentence.format(tmp_path) in " ".join(errors.split())
    assert _TOKEN not in errors
