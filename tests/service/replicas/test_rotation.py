"""Certificates, authorities included, are replaced under load: no text fails."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.front.service import make_service
from tandem.errors import Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.peers.grpc.clients import TargetClient
from tandem.rpc.channel import Dialer, connect
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.tls import ClientTls, server_tls
from tandem.rpc.server import RunningServer
from tests.support.processes.authorities import Authority
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, add_fake, request, serve_fakes

_ROLES = ("server", "drafter", "target", "orchestrator")


pytestmark = pytest.mark.usefixtures("attentive")


class Mounted:
    """The files that services are told of: `authorities.pem`, and a pair for each role."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trust(self, *authorities: Authority) -> None:
        """Have these sign whom services believe."""
        bundle = b"".join(one.cert.read_bytes() for one in authorities)
        self._replace("authorities.pem", bundle)

    def issue(self, authority: Authority) -> None:
        """Give every role a new certificate. Between two files of a pair there is a moment."""
        for role in _ROLES:
            pair = authority.sign(role)
            self._replace(f"{role}.key", pair.key.read_bytes())
            self._replace(f"{role}.crt", pair.cert.read_bytes())

    def _replace(self, name: str, content: bytes) -> None:
        (self.folder / "next").write_bytes(content)
        shutil.move(self.folder / "next", self.folder / name)

    def named(self, name: str) -> NamedFile:
        return NamedFile(name, self.folder / name)

    def settings(self) -> dict[str, Any]:
        """Of the orchestrator, as a caller of its peers."""
        return {
            "peer_ca": self.folder / "authorities.pem",
            "peer_cert": self.folder / "orchestrator.crt",
            "peer_key": self.folder / "orchestrator.key",
        }

    def server(self, role: str, clients: tuple[str, ...] = ()) -> Any:
        pair = self.named(f"{role}.crt"), self.named(f"{role}.key")
        return server_tls(*pair, self.named("authorities.pem"), clients)

    def client(self) -> ClientTls:
        pair = self.named("orchestrator.crt"), self.named("orchestrator.key")
        return ClientTls(self.named("authorities.pem"), *pair)


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    (tmp_path / "mounted").mkdir()
    return Mounted(tmp_path / "mounted")


async def slowly(round_: int | None, context: FakeContext) -> None:
    await asyncio.sleep(0.005)


async def test_no_text_fails_while_everything_is_replaced(mounted: Mounted, tmp_path: Path) -> None:
    """Both authorities are trusted for a while, as in any rotation of one."""
    old, new = (Authority(tmp_path, name) for name in ("old", "new"))
    mounted.trust(old)
    mounted.issue(old)
    drafter, target = FakeDrafter(), FakeTarget()
    drafter.interfere = target.interfere = slowly
    async with serve_fakes(
        drafter,
        target,
        credentials=lambda: mounted.server("server").credentials,
        drafter_tls_name="server",
        target_tls_name="server",
        # A machine may stand still for some seconds; an answer that got lost never comes.
        draft_seconds=15.0,
        stage_floor_seconds=15.0,
        **mounted.settings(),
    ) as settings:
        server = RunningServer("127.0.0.1:0", make_service(settings), mounted.server("server"))
        await server.start()
        await server.ready()
        texts: list[Any] = []
        over = asyncio.Event()

        async def client() -> None:
            """Asks for texts, each on a connection of its own."""
            while not over.is_set():
                address = f"127.0.0.1:{server.port}"
                async with connect(address, mounted.client().credentials(), "server") as channel:
                    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                    texts.append(await stub.Complete(request(), timeout=HANG_SECONDS))

        async with asyncio.TaskGroup() as clients_of_it:
            for _ in range(4):
                clients_of_it.create_task(client())
            steps: tuple[Callable[[], None], ...] = (
                lambda: mounted.issue(old),
                lambda: mounted.trust(old, new),
                lambda: mounted.issue(new),
                lambda: mounted.trust(new),
            )
            for step in steps:
                await served(texts, 12)
                step()
                await asyncio.sleep(0.3)
            await served(texts, 12)
            over.set()
        assert issuer_of(server.port, mounted) == "new"
        streams = target.streams
        assert streams >= 4, "one at least for each change of what the orchestrator shows"
        await server.stop(1.0)
    assert len({tuple(text.token_ids) for text in texts}) == 1
    assert not any(text.summary.drafter_lost for text in texts)


async def served(texts: list[Any], more: int) -> None:
    enough = len(texts) + more
    await until(lambda: len(texts) >= enough)


def issuer_of(port: int, mounted: Mounted) -> str:
    """Who signed what a server shows now."""
    context = ssl.create_default_context(cafile=str(mounted.folder / "authorities.pem"))
    context.load_cert_chain(
        mounted.folder / "orchestrator.crt", mounted.folder / "orchestrator.key"
    )
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="server") as secure,
    ):
        shown: Any = secure.getpeercert()
    return str(shown["issuer"][0][0][1])


async def test_a_text_under_way_ends_where_it_began(mounted: Mounted, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mounted.trust(authority)
    mounted.issue(authority)
    target, go_on, reached = FakeTarget(), asyncio.Event(), asyncio.Event()

    async def wait(round_: int | None, context: FakeContext) -> None:
        if round_ == 2 and not go_on.is_set():
            reached.set()
            await go_on.wait()

    target.interfere = wait
    async with serve_fakes(
        FakeDrafter(),
        target,
        credentials=lambda: mounted.server("server").credentials,
        drafter_tls_name="server",
        target_tls_name="server",
        **mounted.settings(),
    ) as settings:
        server = RunningServer("127.0.0.1:0", make_service(settings))
        await server.start()
        await server.ready()
        async with connect(f"127.0.0.1:{server.port}") as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            first = asyncio.ensure_future(stub.Complete(request(), timeout=HANG_SECONDS))
            await reached.wait()
            mounted.issue(authority)
            await asyncio.sleep(0.3)
            assert not first.done()
            go_on.set()
            assert (await stub.Complete(request(), timeout=HANG_SECONDS)).token_ids == (
                await first
            ).token_ids
            assert target.streams == 2
        await server.stop(1.0)


async def test_credentials_that_are_not_taken_yet_are_tried_again(
    mounted: Mounted, tmp_path: Path
) -> None:
    """The old connection serves meanwhile; nothing of it is seen outside."""
    old, new = (Authority(tmp_path, name) for name in ("old", "new"))
    mounted.trust(old)
    mounted.issue(old)
    target = FakeTarget()
    # The target's own files are others: it learns of the new authority later.
    behind = tmp_path / "behind"
    shutil.copytree(mounted.folder, behind)
    later = Mounted(behind)
    async with serve_fakes(
        target, credentials=lambda: later.server("server").credentials
    ) as settings:
        (address,) = settings.targets
        client = TargetClient(address, Dialer(mounted.client(), "server"))
        seen: list[bool] = []

        async def watch() -> None:
            async with aclosing(client.health(5.0)) as health:
                async for serving in health:
                    seen.append(serving)

        watching = asyncio.create_task(watch())
        await until(lambda: seen == [True])
        mounted.trust(old, new)
        await until(lambda: seen == [True, True])
        mounted.issue(new)
        await asyncio.sleep(0.3)
        assert seen == [True, True]
        assert not watching.done()
        assert (await client.model_info(5.0)).info.model == "fake"
        later.trust(old, new)
        await until(lambda: seen == [True] * 3)
        # Left connections are closed, each after its last sequence.
        await until(lambda: not client._leaving)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close()


async def test_a_pair_replaced_by_halves_is_never_shown(mounted: Mounted, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mounted.trust(authority)
    mounted.issue(authority)
    tls = mounted.client()
    before = tls.version
    next_pair = authority.sign("orchestrator", file="next")
    shutil.copy(next_pair.key, mounted.folder / "orchestrator.key")
    assert tls.version == before
    shutil.copy(next_pair.cert, mounted.folder / "orchestrator.crt")
    assert tls.version == before + 1


async def test_a_replica_behind_a_name_has_that_name(mounted: Mounted, tmp_path: Path) -> None:
    """Its address is an IP address, which certificates of pods have not."""
    authority = Authority(tmp_path)
    mounted.trust(authority)
    mounted.issue(authority)
    server = grpc.aio.server()
    fake = FakeTarget()
    await add_fake(fake, server)
    port = server.add_secure_port("127.0.0.1:0", mounted.server("target").credentials)
    await server.start()
    for found_by, fits in (("target", True), ("drafter", False)):
        client = TargetClient(f"127.0.0.1:{port}", Dialer(mounted.client()), found_by)
        async with aclosing(client.health(2.0)) as health:
            if fits:
                assert await anext(health)
            else:
                with pytest.raises(Unavailable):
                    await anext(health)
        await client.close()
    await server.stop(0)
