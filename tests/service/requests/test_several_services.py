"""One process that serves several gRPC services: they are ready, lost and bounded together."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.server import GrpcService, RunningServer, Service
from tandem.target.v1 import target_pb2, target_pb2_grpc

ORCHESTRATOR = "tandem.orchestrator.v1.OrchestratorService"
TARGET = "tandem.target.v1.TargetService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Front(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    async def Complete(self, request: pb.CompleteRequest, context: Any) -> pb.CompleteResponse:
        return pb.CompleteResponse(text=request.generation.request_id)


class Target(target_pb2_grpc.TargetServiceServicer):
    async def GetTokenizer(self, request: Any, context: Any) -> target_pb2.GetTokenizerResponse:
        return target_pb2.GetTokenizerResponse(fingerprint="here")


async def nothing() -> None:
    await asyncio.sleep(0)


def both() -> tuple[GrpcService, GrpcService]:
    return (
        GrpcService(
            ORCHESTRATOR,
            lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
                Front(),  # type: ignore[abstract]  # the calls that are asked
                server,
            ),
            ("Complete",),
        ),
        GrpcService(
            TARGET,
            lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(
                Target(),  # type: ignore[abstract]
                server,
            ),
            (),
        ),
    )


async def test_each_is_answered_and_they_are_ready_and_lost_together() -> None:
    lost = asyncio.Event()
    service = Service(both(), 1 << 20, nothing, nothing, lost=lost.wait)
    running = RunningServer("127.0.0.1:0", service)
    await running.start()
    await running.ready()
    async with connect(f"127.0.0.1:{running.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> list[int]:
            names = (ORCHESTRATOR, TARGET)
            asked = [health_pb2.HealthCheckRequest(service=name) for name in names]
            return [(await health.Check(one)).status for one in asked]

        assert await statuses() == [SERVING, SERVING]
        front: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        large = pb.CompleteRequest(generation=pb.Generation(request_id="a" * 100_000))
        assert (await front.Complete(large)).text == "a" * 100_000
        target: Any = target_pb2_grpc.TargetServiceStub(channel)
        reply = await target.GetTokenizer(target_pb2.GetTokenizerRequest())
        assert reply.fingerprint == "here"
        # Only the methods that a service names may be sent much.
        padded = target_pb2.GetTokenizerRequest.FromString(b"\x7a\xa0\x8d\x06" + b"a" * 100_000)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await target.GetTokenizer(padded)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        watched = health.Watch(health_pb2.HealthCheckRequest(service=TARGET))
        assert (await watched.read()).status == SERVING
        lost.set()
        assert (await watched.read()).status == NOT_SERVING
        assert await statuses() == [NOT_SERVING, NOT_SERVING]
        watched.cancel()
    await running.stop(0.0)
