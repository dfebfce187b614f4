"""Whether a service of this machine is ready, as it says over gRPC."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc

_CALL_SECONDS = 2.0
_HEALTH_NAMES = {
    "drafter": "tandem.drafter.v1.DrafterService",
    "target": "tandem.target.v1.TargetService",
    "orchestrator": "tandem.orchestrator.v1.OrchestratorService",
}


def is_ready(name: str, address: str) -> bool:
    """Whether a service has loaded its model, or an orchestrator has matched its pair."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=_HEALTH_NAMES[name])
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_CALL_SECONDS)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def refusal(address: str) -> str | None:
    """Why an orchestrator does not take its pair; None if it does."""
    with grpc.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        try:
            stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            return error.details() if isinstance(error, grpc.Call) else str(error)
    return None
