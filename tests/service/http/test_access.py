"""Who may call by HTTP, and what a caller that misbehaves costs."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest

from orchestrator.front.http import server
from orchestrator.front.service import make_service
from orchestrator.settings import OrchestratorSettings
from tandem.errors import StartupError
from tests.service.http.conftest import IN_ONE_LOOP, Fronts, ServedPair, fronting
from tests.support.processes.authorities import Authority
from tests.support.waiting import until

pytestmark = IN_ONE_LOOP

TOKEN = "0123456789abcdef0123456789abcdef"
ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 2}


async def test_a_token_opens_all_but_health(served_pair: ServedPair, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"ann {TOKEN}\n")
    async with fronting(served_pair, token_file=file) as fronts:
        for path in ("/health", "/version"):
            assert (await fronts.http.get(path)).status_code == 200
        for headers in ({}, {"authorization": "Bearer nothing"}, {"authorization": TOKEN}):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("POST", "/tokenize"),
            ):
                reply = await fronts.http.request(method, path, json=ASKED, headers=headers)
                assert reply.status_code == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.json()["error"]["code"] == "invalid_api_key"
        found = await fronts.openai.with_options(api_key=TOKEN).completions.create(
            model="target", **ASKED
        )
        assert found.choices


async def test_pages_of_other_origins_may_not_call(served_pair: ServedPair) -> None:
    async with fronting(served_pair, http_origins=("https://chat.example.com",)) as fronts:
        for origin, status in (
            (f"http://{fronts.address}", 200),
            ("https://chat.example.com", 200),
            ("https://evil.example.com", 403),
            ("null", 403),
            ("http://evil.example.com:8000", 403),
        ):
            # A name that leads here, as a page's owner can arrange it.
            own = {"host": origin.partition("://")[2]} if "evil" in origin else {}
            reply = await fronts.http.post(
                "/v1/completions", json=ASKED, headers={"origin": origin, **own}
            )
            assert reply.status_code == status, origin
        asks = {
            "origin": "https://chat.example.com",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        reply = await fronts.http.options("/v1/completions", headers=asks)
        assert reply.headers["access-control-allow-origin"] == "https://chat.example.com"


async def test_plaintext_stays_on_the_machine() -> None:
    settings = OrchestratorSettings(http_listen="0.0.0.0:0")

    with pytest.raises(StartupError, match=r"TANDEM_ORCHESTRATOR_HTTP_LISTEN: 0\.0\.0\.0:0 is"):
        make_service(settings)


async def test_certificates_are_asked_for_and_renewed(
    served_pair: ServedPair, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own, other = authority.sign("orchestrator"), authority.sign("next")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_bytes(own.cert.read_bytes())
    key.write_bytes(own.key.read_bytes())
    settings = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.cert}
    async with fronting(served_pair, tls_clients=("ann",), **settings) as fronts:
        address = fronts.address.replace("127.0.0.1", "localhost")

        def context(client: str) -> ssl.SSLContext:
            made = ssl.create_default_context(cafile=str(authority.cert))
            made.check_hostname = False
            if client:
                pair = authority.sign(client)
                made.load_cert_chain(pair.cert, pair.key)
            return made

        async def call(client: str) -> int:
            async with httpx2.AsyncClient(verify=context(client)) as http:
                reply = await http.post(f"https://{address}/v1/completions", json=ASKED)
                return int(reply.status_code)

        async def shown() -> str:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", int(address.rpartition(":")[2]), ssl=context("ann")
            )
            found = dict(writer.get_extra_info("peercert"))
            writer.close()
            return str(found["subjectAltName"])

        assert await call("ann") == 200
        assert await call("bob") == 403
        with pytest.raises(httpx2.TransportError):
            await call("")
        first = await shown()
        key.write_bytes(other.key.read_bytes())
        cert.write_bytes(other.cert.read_bytes())
        assert await shown() != first


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for headers is over at once."""
    monkeypatch.setattr(server, "_HEADER_SECONDS", 0.05)


async def test_a_connection_without_a_request_is_cut(hurried: None, fronts: Fronts) -> None:
    host, _, port = fronts.address.rpartition(":")
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


async def test_headers_have_a_bound(fronts: Fronts) -> None:
    host, _, port = fronts.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * (40 << 10))
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(
    served_pair: ServedPair,
) -> None:
    async with fronting(served_pair, idle_seconds=0.05) as fronts:
        host, _, port = fronts.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_client_that_does_not_read_is_cut(
    served_pair: ServedPair, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its texts end, and its connection with them."""
    async with fronting(served_pair, idle_seconds=0.2) as fronts:
        # Little fits in between, and the first rounds have more.
        fronts.server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asked = {"prompt": " " * 8_000, "max_tokens": 400, "ignore_eos": True, "n": 4}
        told = {"echo": True, "stream": True, "tandem": {"tokens": True}}
        body = json.dumps({**asked, **told}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            host, _, port = fronts.address.rpartition(":")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            await loop.sock_sendall(client, head % len(body) + body)
            await until(fronts.services.open_sequences)

            async def idle() -> bool:
                return await fronts.services.open_sequences() == 0

            await until(idle)
            assert "outcome=IdleTimeout" in capsys.readouterr().out
            received = b""
            while part := await loop.sock_recv(client, 1 << 16):
                received += part
            assert b"[DONE]" not in received
