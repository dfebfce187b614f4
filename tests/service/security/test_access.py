"""Access over real sockets: no call of an unauthorized caller reaches a handler."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.security.access import Caller
from tandem.rpc.security.tls import ClientTls, ServerTls
from tandem.rpc.security.tokens import BearerTokens
from tandem.rpc.security.web_tokens import Claims, WebTokens, keys_in
from tests.support.processes.authorities import Authority
from tests.support.wire.gate import (
    TOKEN,
    authority,
    serve,
    tls_of_client,
    tls_of_server,
    tokens_in,
)

__all__ = ["authority", "serve"]  # fixtures of the gate

_ALL = 4


async def test_who_is_known_gets_in(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    """By certificate, by token and by both; each handler learns who it is."""
    mine = tls_of_client(authority, authority.sign("orchestrator"))
    server = await serve(tls_of_server(authority, clients=("orchestrator", "other")))
    assert await server.call(mine) == [None] * _ALL
    assert server.handlers.reached == [Caller("orchestrator", "certificate")] * 3
    tokens = tokens_in(tmp_path, "ann")
    server = await serve(tokens=tokens)
    assert await server.call(token=TOKEN) == [None] * _ALL
    assert server.handlers.reached == [Caller("ann", "token")] * 3
    server = await serve(tls_of_server(authority), tokens)
    assert await server.call(mine, token=TOKEN) == [None] * _ALL
    assert server.handlers.reached == [Caller("ann", "token")] * 3
    server = await serve()
    assert await server.call() == [None] * _ALL
    assert server.handlers.reached == [None] * 3


async def test_who_has_a_token_of_the_issuer_gets_in(serve: Callable[..., Any]) -> None:
    """And one that has expired gets one line, from every method."""
    issuer = ec.generate_private_key(ec.SECP256R1())
    public = {**jwt.algorithms.ECAlgorithm.to_jwk(issuer.public_key(), as_dict=True), "kid": "a"}
    keys = keys_in(json.dumps({"keys": [public]}).encode())
    issued = WebTokens(Claims("https://id.example", "tandem"), lambda _: keys)
    server = await serve(tokens=BearerTokens(None, issued))
    claims = {"iss": "https://id.example", "aud": "tandem", "sub": "ann", "exp": 2**32}
    token = jwt.encode(claims, issuer, "ES256", headers={"kid": "a"})
    assert await server.call(token=token) == [None] * _ALL
    assert server.handlers.reached == [Caller("ann", "token")] * 3
    late = jwt.encode({**claims, "exp": 1}, issuer, "ES256", headers={"kid": "a"})
    assert await server.call(token=late) == [grpc.StatusCode.UNAUTHENTICATED] * _ALL
    assert len(server.handlers.reached) == 3


@pytest.mark.parametrize("who", ["nobody", "expired", "stranger", "self-signed", "plaintext"])
async def test_without_a_good_certificate_there_is_no_connection(
    who: str, serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    others = Authority(tmp_path)
    tls: dict[str, ClientTls | None] = {
        "nobody": tls_of_client(authority),
        "expired": tls_of_client(authority, authority.sign("late", days=-1)),
        "stranger": tls_of_client(authority, others.sign("orchestrator")),
        # Of the same name as the authority, and of another key.
        "self-signed": tls_of_client(authority, Authority(tmp_path, "authority").sign("x")),
        "plaintext": None,
    }
    server = await serve(tls_of_server(authority))
    assert await server.call(tls[who]) == [grpc.StatusCode.UNAVAILABLE] * _ALL
    assert server.handlers.reached == []


async def test_a_caller_knows_the_server_by_authority_and_name(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    pair = authority.sign("orchestrator")
    server = await serve(tls_of_server(authority))
    refused = [grpc.StatusCode.UNAVAILABLE] * _ALL
    assert await server.call(tls_of_client(authority, pair), name="drafter") == refused
    assert await server.call(tls_of_client(Authority(tmp_path), pair)) == refused
    assert server.handlers.reached == []
    # Its address is a name too, which is asked for where no other is.
    assert await server.call(tls_of_client(authority, pair), name="") == [None] * _ALL


async def test_an_expired_server_is_not_spoken_to(
    serve: Callable[..., Any], authority: Authority
) -> None:
    """Its own start would have refused it; it may expire later."""
    pair = authority.sign("server", days=-1)
    key, chain = pair.key.read_bytes(), pair.cert.read_bytes()
    server = await serve(ServerTls(grpc.ssl_server_credentials([(key, chain)]), mutual=False))
    assert await server.call(tls_of_client(authority)) == [grpc.StatusCode.UNAVAILABLE] * _ALL
    assert server.handlers.reached == []


async def test_a_certificate_of_another_name_may_not_call(
    serve: Callable[..., Any], authority: Authority
) -> None:
    """A drafter's own certificate is no key to a target."""
    server = await serve(tls_of_server(authority, clients=("orchestrator",)))
    drafter = tls_of_client(authority, authority.sign("drafter"))
    assert await server.call(drafter) == [grpc.StatusCode.PERMISSION_DENIED] * _ALL
    assert server.handlers.reached == []


async def test_the_common_name_counts_where_there_is_no_other(
    serve: Callable[..., Any], authority: Authority
) -> None:
    server = await serve(tls_of_server(authority, clients=("old",)))
    old = tls_of_client(authority, authority.sign("old", bare=True))
    assert await server.call(old) == [None] * _ALL
    assert server.handlers.reached == [Caller("old", "certificate")] * 3


@pytest.mark.parametrize("token", ["", TOKEN[:-1], f"{TOKEN}0", "f" * 32])
async def test_without_a_good_token_nothing_is_handled(
    token: str, serve: Callable[..., Any], tmp_path: Path
) -> None:
    server = await serve(tokens=tokens_in(tmp_path, "ann"))
    assert await server.call(token=token) == [grpc.StatusCode.UNAUTHENTICATED] * _ALL
    assert server.handlers.reached == []


async def test_a_revoked_tokens_texts_end_and_no_other_begins(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    server = await serve(tokens=tokens_in(tmp_path, "ann"))
    server.handlers.going_on.clear()
    async with connect(f"127.0.0.1:{server.port}") as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        running = stub.Generate(pb.GenerateRequest(), metadata=metadata)
        assert await running.read() == pb.GenerateResponse()
        (tmp_path / "tokens").write_text(f"bob {secrets.token_hex(16)}\n")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(pb.CompleteRequest(), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "authorization: Bearer TOKEN" in (refused.value.details() or "")
        server.handlers.going_on.set()
        assert await running.read() == pb.GenerateResponse()
        assert await running.read() is grpc.aio.EOF
        assert await running.code() is grpc.StatusCode.OK
    assert len(server.handlers.reached) == 1
