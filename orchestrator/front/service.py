"""The orchestrator's fronts over one pool of replicas."""

from __future__ import annotations

from orchestrator.front.grpc.servicer import OrchestratorServicer, grpc_service
from orchestrator.front.tokens import tokens_of
from orchestrator.settings import OrchestratorSettings
from tandem.rpc.channel import age_of
from tandem.rpc.security.settings import context_of
from tandem.rpc.server import Service
from tandem.settings import MIB


def make_service(settings: OrchestratorSettings) -> Service:
    """The orchestrator as `tandem.rpc.process` runs it.

    Raises:
        StartupError: the HTTP port cannot be had, or a file of tokens or TLS is unfit.
    """
    tokens = tokens_of(settings)
    servicer = OrchestratorServicer(settings)
    fronts = []
    if settings.http_listen is not None:
        # Libraries of a quarter of a second, for those who serve it.
        from orchestrator.front.http.app import HttpFront
        from orchestrator.front.http.server import ConnectionLimits, HttpServer

        tls = context_of(settings, settings.http_listen, "http_listen")
        front = HttpFront(settings, servicer.serving, servicer.calls, tokens)
        limits = ConnectionLimits(
            settings.http_connections, settings.idle_seconds, settings.connection_seconds
        )
        fronts.append(HttpServer(settings.http_listen, front.app, limits, tls))
    return Service(
        (grpc_service(servicer),),
        settings.max_message_mib * MIB,
        servicer.serving.become_ready,
        servicer.serving.stop,
        drained=servicer.calls.drained,
        unready=servicer.serving.unready,
        connection_age=age_of(settings),
        metering=servicer.metering,
        tokens=tokens,
        fronts=fronts,
    )
