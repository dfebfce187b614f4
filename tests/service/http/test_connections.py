"""Connections: how many there may be, and how each ends."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front.http import server
from tests.service.http.conftest import IN_ONE_LOOP, Fronts, ServedPair, fronting
from tests.support.processes.authorities import Authority
from tests.support.waiting import until

pytestmark = IN_ONE_LOOP

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}


@asynccontextmanager
async def connection(
    fronts: Fronts,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = fronts.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def posted(body: Any, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def idle(fronts: Fronts) -> bool:
    return await fronts.services.open_sequences() == 0


async def test_one_more_than_may_be_is_closed(served_pair: ServedPair) -> None:
    async with (
        fronting(served_pair, http_connections=1) as fronts,
        connection(fronts) as (first, writer),
        connection(fronts) as (second, _),
    ):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await first.readline()
        assert await second.read() == b""


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for the rest of a body is over at once."""
    monkeypatch.setattr(server, "_REST_SECONDS", 0.05)


async def test_the_body_of_a_refused_call_is_not_waited_for(
    hurried: None, served_pair: ServedPair, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text("ann 0123456789abcdef0123456789abcdef\n")
    async with (
        fronting(served_pair, token_file=file) as fronts,
        connection(fronts) as (reader, writer),
    ):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.write(b"a")
        with suppress(ConnectionResetError):
            await reader.read()


async def test_a_client_that_leaves_behind_a_further_request_is_noticed(fronts: Fronts) -> None:
    async with connection(fronts) as (_, writer):
        writer.write(posted(LONG) + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(fronts.services.open_sequences)
    await until(lambda: idle(fronts))


@pytest.mark.campaign(
    "nothing stays open when two hundred clients leave in mid-stream",
    "one client (this file)",
)
async def test_two_hundred_that_leave_in_mid_stream_leave_nothing_open(fronts: Fronts) -> None:
    async def leave(number: int) -> None:
        shaped = {"guided_regex": "[a-z ]{1900}"} if number % 3 == 0 else {}
        async with connection(fronts) as (reader, writer):
            writer.write(posted({**LONG, **shaped, "stream": True, "n": 1 + number % 2}))
            while not (await reader.readline()).startswith(b"data: "):
                pass

    for first in range(0, 200, 4):
        await asyncio.gather(*(leave(number) for number in range(first, first + 4)))
    await until(lambda: idle(fronts))
    reply = await fronts.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert reply.status_code == 200


async def test_a_further_request_is_answered(fronts: Fronts) -> None:
    async with connection(fronts) as (reader, writer):
        get = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(posted({"prompt": "x", "max_tokens": 2}) + get + get)
        statuses = 0
        while statuses < 3:
            statuses += b" 200 " in await reader.readline()


async def test_no_reply_waits_until_its_headers_are_acknowledged(fronts: Fronts) -> None:
    """A connection inherits it, whichever event loop accepts it."""
    (listening,) = fronts.server.sockets
    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_what_is_no_http_is_told_so(fronts: Fronts) -> None:
    async with connection(fronts) as (reader, writer):
        writer.write(b"\x16\x03\x01 garbage\r\n\r\n")
        answer = (await reader.read()).decode()
        assert " 400 " in answer.splitlines()[0]
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "invalid_value"


async def test_a_stream_that_is_on_when_grace_ends_says_so(
    served_pair: ServedPair,
) -> None:
    async with fronting(served_pair) as fronts, connection(fronts) as (reader, writer):
        writer.write(posted({**LONG, "stream": True}))
        while not (await reader.readline()).startswith(b"data: "):
            pass
        stopping = asyncio.ensure_future(fronts.server.stop(60.0))
        await until(lambda: fronts.server._server.should_exit)
        fronts.server.end_grace()
        rest = (await reader.read()).decode()
        await stopping
        last = [line for line in rest.splitlines() if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"


async def test_a_session_is_not_resumed_without_a_certificate(
    served_pair: ServedPair, tmp_path: Path
) -> None:
    """Its authority may be gone."""
    authority = Authority(tmp_path)
    own, client = authority.sign("orchestrator"), authority.sign("ann")
    settings = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": authority.cert}
    async with fronting(served_pair, **settings) as fronts:
        host, _, port = fronts.address.rpartition(":")
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.check_hostname = False
        context.load_cert_chain(client.cert, client.key)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b" 200 " in await reader.read()
        connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
        assert connection.version() == "TLSv1.3"
        assert connection.session is None or not connection.session.has_ticket
        writer.close()


async def test_an_old_connection_is_closed_behind_a_reply(
    served_pair: ServedPair,
) -> None:
    """So that its client shows its certificate again."""
    async with (
        fronting(served_pair, connection_seconds=1e-6) as fronts,
        connection(fronts) as (reader, writer),
    ):
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b'"version"' in await reader.read()


@pytest.mark.parametrize("size", [30_000, 33_000, 100_000])
async def test_headers_are_bounded_however_they_come(fronts: Fronts, size: int) -> None:
    """In one part, or in several."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: {'a' * size}\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    for parts in ([head.encode() + body], [head[:9].encode(), head[9:].encode(), body]):
        async with connection(fronts) as (reader, writer):
            for part in parts:
                writer.write(part)
                with suppress(ConnectionResetError):
                    await writer.drain()
            expected = b" 200 " if size < 32 << 10 else b" 400 "
            assert expected in await reader.readline()


async def test_a_service_that_stops_takes_no_new_connections(
    served_pair: ServedPair,
) -> None:
    """A text that has begun goes on."""
    async with fronting(served_pair) as fronts, connection(fronts) as (reader, writer):
        writer.write(posted({**LONG, "max_tokens": 400, "stream": True}))
        assert b" 200 " in await reader.readline()
        stopping = asyncio.create_task(fronts.server.stop(60))

        async def refused() -> bool:
            try:
                async with connection(fronts):
                    return False
            except ConnectionError:
                return True

        await until(refused)
        assert b"data: [DONE]" in await reader.read()
        await stopping
