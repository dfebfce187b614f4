"""Names of replicas: what a name may look like, and names without an answer or an address."""

from __future__ import annotations

import grpc
import pytest

from orchestrator.front.service import make_service
from orchestrator.settings import OrchestratorSettings
from tandem.peers.replicas.dns import Name, name_of
from tests.support.waiting import until
from tests.support.wire.fakes import FakeTarget
from tests.support.wire.fleet import NAME, Fleet, fleet

__all__ = ["fleet"]  # a fixture of all files of replicas


@pytest.mark.parametrize("silent", [True, False])
async def test_replicas_stay_where_their_name_is_not_answered(fleet: Fleet, silent: bool) -> None:
    target = FakeTarget()
    await fleet.start(target)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    fleet.names.silent = silent
    if not silent:
        del fleet.names.records[NAME]
    asked = fleet.names.asked
    await until(lambda: fleet.names.asked > asked + 1)
    assert list((await fleet.text()).token_ids) == target.text(20)


async def test_a_name_without_addresses_is_waited_for(fleet: Fleet) -> None:
    await fleet.orchestrate()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet.text()
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE

    async def told() -> bool:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.text()
        return f"{NAME} has no address" in str(refused.value.details())

    await until(told)
    await fleet.start(FakeTarget())
    await until(fleet.is_serving)
    await fleet.text()


async def test_a_name_that_is_none_is_refused_at_the_start() -> None:
    for target in ("dns:targets", "dns:///targets", "dns:///:50052"):
        with pytest.raises(Exception, match="is no dns:///HOST:PORT"):
            make_service(OrchestratorSettings(targets=(target,), peer_plaintext="allow"))
    for target, wrong in (
        ("dns:///targets:65536", "65536 is no port"),
        ("dns://127.0.0.1:0/targets:50052", "0 is no port"),
        # c-ares would raise later, where only the log of a dead task would say so.
        ("dns://nameserver/targets:50052", "'nameserver' is no IP address"),
    ):
        with pytest.raises(Exception, match=wrong):
            make_service(OrchestratorSettings(targets=(target,), peer_plaintext="allow"))


def test_a_name_may_say_who_is_asked() -> None:
    assert name_of("dns://10.0.0.10/targets:50052") == Name("targets", 50052, ("10.0.0.10", 53))
    assert name_of("dns://[::1]:5353/targets:50052") == Name("targets", 50052, ("::1", 5353))
