"""Asks a service of this machine over gRPC whether it is ready."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.endpoint import Endpoint
from tandem.target.v1 import target_pb2, target_pb2_grpc

_CALL_SECONDS = 2.0
_HEALTH_NAMES = {
    "drafter": "tandem.drafter.v1.DrafterService",
    "target": "tandem.target.v1.TargetService",
    "orchestrator": "tandem.orchestrator.v1.OrchestratorService",
}


def is_ready(name: str, endpoint: Endpoint) -> bool:
    """Whether a service has loaded its model, or an orchestrator has matched its pair."""
    with endpoint.connect_blocking() as channel:
        request = health_pb2.HealthCheckRequest(service=_HEALTH_NAMES[name])
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_CALL_SECONDS)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def drafts_by(name: str, endpoint: Endpoint) -> str:
    """The recipe that a drafter reports (JSON), or a target that drafts; empty if it does not
    answer."""
    with endpoint.connect_blocking() as channel:
        try:
            if name == "target":
                target = target_pb2_grpc.TargetServiceStub(channel)
                request = target_pb2.GetModelInfoRequest()
                return target.GetModelInfo(request, timeout=_CALL_SECONDS).drafts.recipe
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            asked = drafter_pb2.GetModelInfoRequest()
            return stub.GetModelInfo(asked, timeout=_CALL_SECONDS).recipe
        except grpc.RpcError:
            return ""


def is_improving(name: str, endpoint: Endpoint) -> bool:
    """Whether a drafter or a target still searches for the fastest back end for its model."""
    with endpoint.connect_blocking() as channel:
        try:
            if name == "drafter":
                drafter = drafter_pb2_grpc.DrafterServiceStub(channel)
                asked = drafter_pb2.GetModelInfoRequest()
                return drafter.GetModelInfo(asked, timeout=_CALL_SECONDS).info.improving
            target = target_pb2_grpc.TargetServiceStub(channel)
            request = target_pb2.GetModelInfoRequest()
            return target.GetModelInfo(request, timeout=_CALL_SECONDS).info.improving
        except grpc.RpcError:
            return False


def refusal(endpoint: Endpoint) -> str | None:
    """Why an orchestrator refuses its pair; None if it accepts it."""
    with endpoint.connect_blocking() as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        try:
            stub.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=_CALL_SECONDS, metadata=endpoint.metadata
            )
        except grpc.RpcError as error:
            return error.details() if isinstance(error, grpc.Call) else str(error)
    return None
