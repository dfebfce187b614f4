"""No connection lasts for ever: peers check certificates again, and no text notices."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.errors import Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.peers.grpc import connection
from tandem.peers.grpc.clients import TargetClient
from tandem.peers.grpc.connection import Peer
from tandem.rpc.channel import Dialer, connect
from tandem.rpc.server import RunningServer, Service
from tandem.target.v1 import target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.replicas.test_rotation import Mounted, served
from tests.support.processes.authorities import Authority
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fakes import FakeTarget, request, serve_fakes
from tests.support.wire.steps import open_verify
from tests.support.wire.talk import Talk

# What callers of drafters and targets have, and what orchestrators take of it.
AGES: dict[str, Any] = {"connection_seconds": 1.5, "connection_grace_seconds": HANG_SECONDS}
OWN_AGE = 0.5


pytestmark = pytest.mark.usefixtures("attentive")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    (tmp_path / "mounted").mkdir()
    mounted, authority = Mounted(tmp_path / "mounted"), Authority(tmp_path)
    mounted.trust(authority)
    mounted.issue(authority)
    return mounted


async def start(stack: AsyncExitStack, service: Service, tls: Any = None) -> str:
    server = RunningServer("127.0.0.1:0", service, tls)
    await server.start()
    stack.push_async_callback(server.stop, 1.0)
    await server.ready()
    return f"127.0.0.1:{server.port}"


async def test_no_text_notices_that_connections_are_left(
    mounted: Mounted, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load, until a connection of each role, and the one after it, were left and closed."""
    left = Counter[str]()
    leave = Peer._leave

    async def noted(self: Peer, older: Any) -> None:
        await leave(self, older)
        left[self.role] += 1

    monkeypatch.setattr(Peer, "_leave", noted)
    # Longer than a stall: a text that has asked for a sequence begins it on the old connection.
    monkeypatch.setattr(connection, "_HANDOVER_SECONDS", 1.0)
    models = [str(model) for model in random_pair]
    async with AsyncExitStack() as stack:
        drafters = await start(
            stack, make_drafter(DrafterSettings(model=models[0], **AGES)), mounted.server("drafter")
        )
        targets = await start(
            stack, make_target(TargetSettings(model=models[1], **AGES)), mounted.server("target")
        )
        settings = OrchestratorSettings(
            drafters=(drafters,),
            targets=(targets,),
            drafter_tls_name="drafter",
            target_tls_name="target",
            gamma=4,
            failover_seconds=0.0,
            peer_connection_seconds=OWN_AGE,
            **mounted.settings(),
        )
        address = await start(stack, make_orchestrator(settings))
        channel = await stack.enter_async_context(connect(address))
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        texts: list[Any] = []
        over = asyncio.Event()

        async def client() -> None:
            while not over.is_set():
                stopping = {"max_new_tokens": 20, "ignore_eos": True}
                greedy = request(sampling={"temperature": 0.0}, stopping=stopping)
                texts.append(await stub.Complete(greedy, timeout=HANG_SECONDS))

        with capture_logs() as logs:
            async with asyncio.TaskGroup() as clients:
                for _ in range(3):
                    clients.create_task(client())
                await until(lambda: min(left["drafter"], left["target"]) >= 2)
                await served(texts, 3)
                over.set()
    assert {log["event"] for log in logs} <= {"request ended"}, "no replica was away for a moment"
    assert len({tuple(text.token_ids) for text in texts}) == 1
    assert not any(text.summary.drafter_lost for text in texts)


async def test_a_caller_that_does_not_leave_is_cut_off(
    mounted: Mounted, random_pair: tuple[Path, Path]
) -> None:
    async with AsyncExitStack() as stack:
        ages: dict[str, Any] = {"connection_seconds": 0.3, "connection_grace_seconds": 0.5}
        settings = TargetSettings(model=str(random_pair[1]), **ages)
        address = await start(stack, make_target(settings), mounted.server("target"))
        credentials = mounted.client().credentials()
        channel = await stack.enter_async_context(connect(address, credentials, "target"))
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        talk = Talk(stub.Verify())
        assert (await talk.ask(open_verify())).HasField("opened")
        async with asyncio.timeout(HANG_SECONDS):
            code, _ = await talk.end()
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_connection_that_cannot_be_replaced_is_given_up(
    mounted: Mounted, tmp_path: Path
) -> None:
    """As where the authority that signed the other side's certificate is trusted no more."""
    async with serve_fakes(
        FakeTarget(), credentials=lambda: mounted.server("server").credentials
    ) as settings:
        (address,) = settings.targets
        mine = Mounted(tmp_path / "mine")
        mine.folder.mkdir()
        for file in mounted.folder.iterdir():
            (mine.folder / file.name).write_bytes(file.read_bytes())
        client = TargetClient(address, Dialer(mine.client(), "server", OWN_AGE))
        async with aclosing(client.health(5.0)) as health:
            assert await anext(health)
            mine.trust(Authority(tmp_path, "other"))
            with pytest.raises(Unavailable):
                async with asyncio.timeout(HANG_SECONDS):
                    await anext(health)
        await client.close()


async def test_an_old_connection_is_left_for_a_new_one_without_tls_too() -> None:
    target = FakeTarget()
    async with serve_fakes(target) as settings:
        client = TargetClient(settings.targets[0], Dialer(age_seconds=OWN_AGE))
        first = client._now
        async with aclosing(client.health(5.0)) as health:
            assert await anext(health)
            async with asyncio.timeout(HANG_SECONDS):
                assert await anext(health)
            assert client._now is not first
            await until(lambda: not client._leaving)
            assert (await client.model_info(5.0)).info.model == "fake"
        await client.close()
