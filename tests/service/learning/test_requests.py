"""Whether a text may be kept reaches its drafters, and the version of their weights its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx2
import pytest
from typer.testing import CliRunner

from orchestrator.front.service import make_service
from tandem.client.blocking import Client
from tandem.client.options import Options
from tandem.rpc.server import RunningServer
from tandem.tools.cli.main import app
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request, serve_fakes

SEEDED: dict[str, Any] = {"sampling": {"seed": 3}, "speculation": {"gamma": 4}}


def told(drafter: FakeDrafter) -> list[bool | None]:
    """What each opening said; None for nothing."""
    return [one.learn if one.HasField("learn") else None for one in drafter.openings]


@asynccontextmanager
async def fronts(*fakes: FakeDrafter | FakeTarget) -> AsyncIterator[tuple[str, str]]:
    """The addresses of an orchestrator, by gRPC and by HTTP."""
    async with serve_fakes(*fakes, http_listen="127.0.0.1:0") as settings:
        service = make_service(settings)
        server = RunningServer("127.0.0.1:0", service)
        await server.start()
        await server.ready()
        try:
            yield f"127.0.0.1:{server.port}", f"127.0.0.1:{service.fronts[0].port}"
        finally:
            await server.stop(1.0)


@pytest.mark.parametrize(
    ("asked", "said"), [({}, None), ({"learn": True}, None), ({"learn": False}, False)]
)
async def test_a_drafter_is_told_of_texts_that_may_not_be_kept(
    asked: dict[str, bool], said: bool | None
) -> None:
    drafter = FakeDrafter(weights_version=3)
    async with orchestrate(drafter, FakeTarget()) as stub:
        reply = await stub.Complete(request(**asked))
    assert told(drafter) == [said]
    assert reply.summary.drafter_weights_version == 3


@pytest.mark.parametrize(
    ("asked", "said"), [({}, None), ({"learn": None}, None), ({"learn": False}, False)]
)
async def test_by_http_too(asked: dict[str, bool | None], said: bool | None) -> None:
    drafter = FakeDrafter(weights_version=3)
    async with (
        fronts(drafter, FakeTarget()) as (_, address),
        httpx2.AsyncClient(timeout=HANG_SECONDS, verify=False) as client,
    ):
        body = {"prompt": [1], "max_tokens": 12, "tandem": asked}
        reply = await client.post(f"http://{address}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert told(drafter) == [said]
    assert reply.json()["usage"]["tandem"]["drafter_weights_version"] == 3


async def test_by_the_command_too() -> None:
    drafter = FakeDrafter(weights_version=3)

    async def tandem(*words: str) -> str:
        run = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert run.exit_code == 0, run.output
        return run.stdout

    async with fronts(drafter, FakeTarget()) as (address, _):
        text = ("generate", "--token-ids", "1", "-n", "12", "--json", "-a", address)
        assert '"drafter_weights_version": "3"' in await tandem(*text)
        await tandem(*text, "--no-learn")
        assert "version 3" in await tandem("info", "-a", address)
    assert told(drafter) == [None, False]


async def test_a_chat_by_the_command_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def talk(client: Client, options: Options, system: str | None) -> None:
        found.append(options["learn"])

    monkeypatch.setattr("tandem.tools.cli.commands.chat._talk", talk)
    async with fronts(FakeDrafter(), FakeTarget()) as (address, _):
        for words in (["--no-learn"], []):
            asked = ["chat", "-a", address, *words]
            run = await asyncio.to_thread(CliRunner().invoke, app, asked)
            assert run.exit_code == 0, run.output
    assert found == [False, None]


async def test_each_drafter_of_a_text_is_told_and_the_last_ones_weights_count() -> None:
    drafters = FakeDrafter(weights_version=3), FakeDrafter(weights_version=5)
    serving: list[FakeDrafter] = []

    def interfere_with(drafter: FakeDrafter) -> None:
        async def die_first(at: int | None, context: FakeContext) -> None:
            if at is None:
                serving.append(drafter)
            if at == 3 and len(serving) == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        drafter.interfere = die_first

    for drafter in drafters:
        interfere_with(drafter)
    # A text with a seed and a size waits for its next drafter.
    async with orchestrate(*drafters, FakeTarget(), queue_seconds=HANG_SECONDS) as stub:
        asked = request(learn=False, stopping={"max_new_tokens": 40}, **SEEDED)
        reply = await stub.Complete(asked)
    assert reply.summary.drafter_lost
    first, last = serving
    assert first is not last
    assert [*told(first), *told(last)] == [False, False]
    assert reply.summary.drafter_weights_version == last.info.weights_version


async def test_a_text_without_a_drafter_has_no_version() -> None:
    async with orchestrate(FakeDrafter(weights_version=3), FakeTarget()) as stub:
        reply = await stub.Complete(request(speculation={"gamma": 0}))
    assert reply.summary.drafter_weights_version == 0
