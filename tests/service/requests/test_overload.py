"""More texts than the targets can hold: which wait, which are refused, and what that costs."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from orchestrator.front.service import make_service
from orchestrator.sizes.adaptive import Adaptation
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.tls import ClientTls, server_tls
from tandem.rpc.server import RunningServer
from tests.support.processes.authorities import Authority
from tests.support.waiting import until
from tests.support.wire.fakes import (
    FakeDrafter,
    FakeTarget,
    orchestrate,
    request,
    serve_fakes,
)

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class Gate:
    """Texts of a target that stand still until they are let go."""

    def __init__(self, target: FakeTarget) -> None:
        self.open = asyncio.Event()
        self.inside = 0
        self.most = 0
        target.interfere = self._stand

    async def _stand(self, round_: int | None, context: Any) -> None:
        if round_ is not None and not self.open.is_set():
            self.inside += 1
            self.most = max(self.most, self.inside)
            await self.open.wait()
            self.inside -= 1


async def test_texts_wait_here_and_hold_nothing_there() -> None:
    drafter, target = FakeDrafter(max_sequences=2), FakeTarget(max_sequences=2)
    gate = Gate(target)
    async with orchestrate(drafter, target) as stub:
        calls = [asyncio.ensure_future(stub.Complete(request())) for _ in range(6)]
        await until(lambda: gate.inside == 2)
        await asyncio.sleep(0.1)
        assert (drafter.opened, target.opened) == (2, 2)
        gate.open.set()
        for reply in await asyncio.gather(*calls):
            assert list(reply.token_ids) == target.text(20)
            assert not reply.summary.drafter_lost
        assert gate.most == 2
        assert (drafter.ended, target.ended) == (6, 6)
        waited = [call.result().summary.stages.place_wait_ns for call in calls]
        assert sum(wait > 50_000_000 for wait in waited) == 4


async def test_texts_that_wait_are_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounds take is learnt by how many texts share the services."""
    learning: list[Adaptation] = []

    class Noted(Adaptation):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            learning.append(self)

    monkeypatch.setattr("orchestrator.sizes.policies.Adaptation", Noted)
    target = FakeTarget(max_sequences=2)
    gate = Gate(target)
    async with orchestrate(FakeDrafter(), target, gamma="auto") as stub:
        open_sizes = request(speculation={})
        calls = [asyncio.ensure_future(stub.Complete(open_sizes)) for _ in range(6)]
        await until(lambda: gate.inside == 2)
        await asyncio.sleep(0.1)
        assert [all_texts.texts for all_texts in learning] == [2]
        gate.open.set()
        await asyncio.gather(*calls)


async def test_a_refusal_says_when_to_come_again() -> None:
    target = FakeTarget(max_sequences=1)
    gate = Gate(target)
    async with orchestrate(FakeDrafter(), target, max_waiting=0) as stub:
        going = asyncio.ensure_future(stub.Complete(request()))
        await until(lambda: gate.inside == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request())
        error = refused.value
        assert error.code() == EXHAUSTED
        assert "every place is taken, and 0 others wait; try again in" in str(error.details())
        trailing = dict(error.trailing_metadata() or ())
        assert 100 <= int(trailing["grpc-retry-pushback-ms"]) <= 30_000
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        assert (status.code, status.message) == (EXHAUSTED.value[0], error.details())
        info = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert info.retry_delay.ToMilliseconds() == int(trailing["grpc-retry-pushback-ms"])
        assert target.opened == 1
        gate.open.set()
        await going


async def test_tokens_of_the_cache_are_places_as_well() -> None:
    drafter, target = FakeDrafter(), FakeTarget(max_sequences=8, cache_tokens=70)
    gate = Gate(target)
    async with orchestrate(drafter, target) as stub:
        # A prompt of 3 and 20 tokens each: three of them fit.
        calls = [asyncio.ensure_future(stub.Complete(request())) for _ in range(5)]
        await until(lambda: gate.inside == 3)
        await asyncio.sleep(0.1)
        assert target.opened == 3
        gate.open.set()
        await asyncio.gather(*calls)


async def test_clients_are_told_apart_by_the_header_that_names_them() -> None:
    target = FakeTarget(max_sequences=1)
    gate = Gate(target)
    settings: dict[str, Any] = {"client_header": "x-client", "max_client_requests": 2}
    async with orchestrate(FakeDrafter(), target, **settings) as stub:
        greedy = (("x-client", "greedy"),)
        calls = [asyncio.ensure_future(stub.Complete(request(), metadata=greedy)) for _ in range(2)]
        await until(lambda: gate.inside == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="a client may have 2"):
            await stub.Complete(request(), metadata=greedy)
        modest = asyncio.ensure_future(stub.Complete(request(), metadata=(("x-client", "modest"),)))
        await asyncio.sleep(0.05)
        gate.open.set()
        await asyncio.gather(*calls, modest)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def test_who_has_proved_who_he_is_takes_no_share_by_the_header(tmp_path: Path) -> None:
    """Neither another's, nor one more for each name that it thinks of."""
    target = FakeTarget(max_sequences=1)
    gate = Gate(target)
    tokens = {name: secrets.token_hex(16) for name in ("greedy", "modest")}
    file = tmp_path / "tokens"
    file.write_text("".join(f"{name} {token}\n" for name, token in tokens.items()))
    settings: dict[str, Any] = {"client_header": "x-client", "max_client_requests": 2}
    async with orchestrate(FakeDrafter(), target, token_file=file, **settings) as stub:

        def ask(owner: str, named: str) -> asyncio.Future[Any]:
            metadata = (*bearer(tokens[owner]), ("x-client", named))
            call: asyncio.Future[Any] = asyncio.ensure_future(
                stub.Complete(request(), metadata=metadata)
            )
            return call

        calls = [ask("greedy", "modest"), ask("greedy", "someone")]
        await until(lambda: gate.inside == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="a client may have 2"):
            await ask("greedy", "another")
        calls += [ask("modest", "greedy") for _ in range(2)]
        await asyncio.sleep(0.05)
        gate.open.set()
        await asyncio.gather(*calls)


@pytest.mark.parametrize("nameless", [False, True])
async def test_a_certificate_tells_clients_apart_and_the_header_does_not(
    nameless: bool, tmp_path: Path
) -> None:
    """Those whose certificates have no name are one client, whatever they say."""
    authority = Authority(tmp_path)
    server_pair, pair = authority.sign("server"), authority.sign("" if nameless else "greedy")
    ca = NamedFile("CA", authority.cert)
    tls = server_tls(NamedFile("C", server_pair.cert), NamedFile("K", server_pair.key), ca, ())
    mine = ClientTls(ca, NamedFile("C", pair.cert), NamedFile("K", pair.key))
    target = FakeTarget(max_sequences=1)
    gate = Gate(target)
    settings: dict[str, Any] = {"client_header": "x-client", "max_client_requests": 1}
    async with serve_fakes(FakeDrafter(), target, **settings) as chosen:
        server = RunningServer("127.0.0.1:0", make_service(chosen), tls)
        await server.start()
        await server.ready()
        address = f"127.0.0.1:{server.port}"
        async with connect(address, mine.credentials(), "server") as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            running = asyncio.ensure_future(
                stub.Complete(request(), metadata=(("x-client", "one"),))
            )
            await until(lambda: gate.inside == 1)
            with pytest.raises(grpc.aio.AioRpcError, match="a client may have 1"):
                await stub.Complete(request(), metadata=(("x-client", "another"),))
            gate.open.set()
            await running
        await server.stop(1.0)
