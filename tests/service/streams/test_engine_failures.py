"""A model that fails and a device that is lost, as clients of the service see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.common.v1 import common_pb2
from tandem.engine.stepper import Stepper
from tandem.inference.feed import Feed
from tandem.inference.output import PassOutput
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.servicer import TargetServicer, service_of
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.talk import Talk

NAME = "tandem.target.v1.TargetService"
OPEN = target_pb2.SequenceRequest(
    open=target_pb2.OpenSequence(
        request_id="r",
        token_ids=[1, 2],
        sampling=common_pb2.Sampling(seed=0),
        verifier="block",
        max_new_tokens=50,
    )
)
VERIFY = target_pb2.SequenceRequest(verify=target_pb2.VerifyStep(round=1, position=3))


class Target:
    """A target whose model can be told to fail."""

    def __init__(self, servicer: TargetServicer, channel: grpc.aio.Channel) -> None:
        self.servicer = servicer
        self.stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def fail_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = self.servicer.loaded.decoder
        forward, failures = decoder.forward, iter([RuntimeError("out of memory")])

        def fail(feeds: Sequence[Feed]) -> PassOutput:
            for failure in failures:
                raise failure
            return forward(feeds)

        monkeypatch.setattr(decoder, "forward", fail)

    async def waits_until_not_serving(self, service: str) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            async for reply in self.health.Watch(health_pb2.HealthCheckRequest(service=service)):
                if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return

    async def is_serving(self, service: str) -> bool:
        reply = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
async def target(random_pair: tuple[Path, Path]) -> AsyncIterator[Target]:
    servicer = TargetServicer(TargetSettings(model=str(random_pair[1])))
    async with AsyncExitStack() as stack:
        server = await start(stack, service_of(servicer))
        await server.ready()
        yield Target(servicer, await connect(stack, address_of(server)))


async def opened(target: Target) -> Talk:
    call = Talk(target.stub.Verify())
    await call.write(OPEN)
    assert (await call.read()).HasField("opened")
    return call


async def status_of(call: Talk) -> grpc.StatusCode:
    """What a sequence ends with instead of an answer."""
    return (await call.end())[0]


async def test_a_failed_step_ends_its_sequences_and_no_others(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, other = await opened(target), await opened(target)
    target.fail_once(monkeypatch)
    await failing.write(VERIFY)
    assert await status_of(failing) == grpc.StatusCode.INTERNAL
    await other.write(VERIFY)
    assert (await other.read()).HasField("verdict")
    other.cancel()
    assert await target.is_serving(NAME)
    info = await target.stub.GetModelInfo(target_pb2.GetModelInfoRequest())
    assert info.stats.open_sequences == 0


async def test_a_lost_device_is_not_serving(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = await opened(target)
    target.fail_once(monkeypatch)
    monkeypatch.setattr(Stepper, "answers", lambda self: False)
    await call.write(VERIFY)
    assert await status_of(call) == grpc.StatusCode.INTERNAL
    for service in ("", NAME):
        await target.waits_until_not_serving(service)
    late = Talk(target.stub.Verify())
    await late.write(OPEN)
    assert await status_of(late) == grpc.StatusCode.UNAVAILABLE
