"""A fault at a chosen message to or from a drafter or a target: the text stays the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from orchestrator.front.service import make_service
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.server import RunningServer
from tests.faults.campaign.proxy import Passing, Proxy, Way, proxied
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fakes import FakeDrafter, FakeTarget, request, serve_fakes

Fault = Callable[[Proxy, Passing], None]

CUTS: dict[str, Fault] = {
    "RST": lambda proxy, passing: proxy.cut(),
    "FIN": lambda proxy, passing: proxy.cut(reset=False),
}
SILENCES: dict[str, Fault] = {
    "half open, both ways": lambda proxy, passing: proxy.hold(),
    "half open, there": lambda proxy, passing: proxy.hold(Way.THERE),
    "half open, back": lambda proxy, passing: proxy.hold(Way.BACK),
    "dropped": lambda proxy, passing: passing.drop(),
}
GARBAGE: dict[str, Fault] = {"corrupted": lambda proxy, passing: passing.corrupt()}
KINDS = {
    "target": ("open", "opened", "verify", "verdict", "close"),
    "drafter": ("open", "opened", "draft", "drafted", "close"),
}
ONE_WAY = pytest.mark.campaign(
    "a line that is silent one way loses no text, at each message",
    "the same where it is silent both ways, or one message is lost (this file)",
)
SCENARIOS = [
    *((role, kind, name) for role in KINDS for kind in KINDS[role] for name in CUTS),
    *(
        pytest.param(
            role, kind, name, marks=() if name in ("half open, both ways", "dropped") else ONE_WAY
        )
        for role in KINDS
        for kind in KINDS[role][:4]
        for name in SILENCES
    ),
]
# What a stage may take: the fakes take none of it, but a busy machine may stand still meanwhile.
SECONDS = 0.5


class Stage:
    """Two drafters and two targets that count, each behind a proxy, and an orchestrator.

    Attributes:
        proxies: by role.
        fakes: by role.
        stub: of the orchestrator.
    """

    def __init__(self) -> None:
        self.proxies: dict[str, list[Proxy]] = {"drafter": [], "target": []}
        self.fakes: dict[str, list[Any]] = {"drafter": [], "target": []}
        self.stub: Any = None

    def strike(self, role: str, kind: str, fault: Fault, at: int = 2) -> asyncio.Event:
        """Have a fault come to the line of a role where a kind of message passes next; of steps the
        at-th. Tells when it has."""
        counts: dict[Proxy, itertools.count[int]] = {}
        struck = asyncio.Event()
        steps = ("draft", "drafted", "verify", "verdict")

        def watch(proxy: Proxy) -> None:
            counts[proxy] = itertools.count(1)

            async def interfere(passing: Passing) -> None:
                if kind not in passing.kinds or struck.is_set():
                    return
                if kind in steps and next(counts[proxy]) < at:
                    return
                struck.set()
                fault(proxy, passing)

            proxy.interfere = interfere

        for proxy in self.proxies[role]:
            watch(proxy)
        return struck

    async def text(self, **changes: Any) -> Any:
        return await self.stub.Complete(request(**changes), timeout=HANG_SECONDS)


@asynccontextmanager
async def staged(**settings: Any) -> AsyncIterator[Stage]:
    stage = Stage()
    fakes = FakeDrafter(), FakeDrafter(), FakeTarget(), FakeTarget()
    waits = {
        f"{name}_seconds": SECONDS for name in ("open", "draft", "verify", "connect", "stage_floor")
    }
    async with AsyncExitStack() as stack:
        chosen = await stack.enter_async_context(serve_fakes(*fakes, **(waits | settings)))
        for role, addresses in (("drafter", chosen.drafters), ("target", chosen.targets)):
            for address in addresses:
                proxy = await stack.enter_async_context(proxied(role, address))
                stage.proxies[role].append(proxy)
        stage.fakes = {"drafter": list(fakes[:2]), "target": list(fakes[2:])}
        behind = {
            f"{role}s": tuple(p.address for p in found) for role, found in stage.proxies.items()
        }
        server = RunningServer("127.0.0.1:0", make_service(chosen.model_copy(update=behind)))
        await server.start()
        stack.push_async_callback(server.stop, 0.2)
        await server.ready()
        channel = await stack.enter_async_context(connect(f"127.0.0.1:{server.port}"))
        stage.stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        yield stage


@pytest.mark.parametrize(("role", "kind", "name"), SCENARIOS)
async def test_a_fault_changes_no_text_and_fails_none(role: str, kind: str, name: str) -> None:
    async with staged() as stage:
        struck = stage.strike(role, kind, {**CUTS, **SILENCES}[name])
        expected = FakeTarget().text(20)
        texts = await asyncio.gather(*(stage.text() for _ in range(3)))
        assert struck.is_set()
        assert [list(text.token_ids) for text in texts] == [expected] * 3
        # Whoever is left serves, drafts and all; what is cut only is back soon.
        assert list((await stage.text()).token_ids) == expected
        assert (await stage.text()).summary.accepted_tokens > 0


@pytest.mark.parametrize("role", ["drafter", "target"])
@pytest.mark.parametrize("kind", ["step", "answer"])
async def test_what_is_corrupted_ends_its_text_at_worst(role: str, kind: str) -> None:
    """Nothing can tell a changed number from a meant one without TLS; so it may be another text."""
    name = {"step": KINDS[role][2], "answer": KINDS[role][3]}[kind]
    async with staged() as stage:
        struck = stage.strike(role, name, GARBAGE["corrupted"])
        outcome: Any = (await asyncio.gather(stage.text(), return_exceptions=True))[0]
        if isinstance(outcome, grpc.aio.AioRpcError):
            assert outcome.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
        else:
            assert len(outcome.token_ids) == 20
        assert struck.is_set()
        assert list((await stage.text()).token_ids) == FakeTarget().text(20)


async def test_a_slow_line_is_no_fault() -> None:
    async with staged(stage_floor_seconds=5.0, verify_seconds=5.0, draft_seconds=5.0) as stage:
        for proxy in itertools.chain(*stage.proxies.values()):
            proxy.delay = 0.01
        reply = await stage.text()
        assert list(reply.token_ids) == FakeTarget().text(20)
        assert not reply.summary.drafter_lost
