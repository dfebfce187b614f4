"""Messages that no peer of ours sends: how the services answer them, and what they cost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import Unavailable
from tandem.peers.grpc.clients import DrafterClient
from tandem.peers.grpc.draft_call import DraftCall
from tandem.peers.text.contracts import Prompt
from tandem.peers.text.record import TextRecord
from tandem.speculation.request.sampling import Sampling
from tests.service.conftest import Stack, address_of, start
from tests.service.one_stack import IN_ONE_LOOP, shared_stack, stack
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fakes import ANYBODY, PATIENT, FakeDrafter, FakeTarget, orchestrate, request
from tests.support.wire.talk import Talk

__all__ = ["shared_stack", "stack"]  # fixtures

pytestmark = IN_ONE_LOOP

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
# A tag with a wire type that does not exist.
JUNK = b"\x0f\xff\xff"
COMMON = {
    "/grpc.health.v1.Health/Check": "unary",
    "/grpc.health.v1.Health/Watch": "server",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "both",
}
METHODS = {
    "drafter": {
        "/tandem.drafter.v1.DrafterService/Draft": "both",
        "/tandem.drafter.v1.DrafterService/GetModelInfo": "unary",
    },
    "target": {
        "/tandem.target.v1.TargetService/Verify": "both",
        "/tandem.target.v1.TargetService/GetModelInfo": "unary",
        "/tandem.target.v1.TargetService/GetTokenizer": "unary",
    },
    "orchestrator": {
        "/tandem.orchestrator.v1.OrchestratorService/Generate": "server",
        "/tandem.orchestrator.v1.OrchestratorService/Complete": "unary",
        "/tandem.orchestrator.v1.OrchestratorService/GetModelInfo": "unary",
    },
}
CASES = [
    (service, method, kind)
    for service, methods in METHODS.items()
    for method, kind in (methods | COMMON).items()
]


async def ended_with(
    channel: Any, method: str, kind: str, data: bytes
) -> tuple[grpc.StatusCode, str]:
    """What raw bytes sent to a method are answered."""
    call: Any
    if kind == "unary":
        call = channel.unary_unary(method)(data)
    elif kind == "server":
        call = channel.unary_stream(method)(data)
    else:
        call = channel.stream_stream(method)()
        await call.write(data)
    async with asyncio.timeout(HANG_SECONDS):
        return await call.code(), str(await call.details())


@pytest.mark.parametrize(("service", "method", "kind"), CASES)
async def test_bytes_that_are_no_message_are_the_callers_fault(
    stack: Stack, service: str, method: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = stack.channels[service]
    with capture_logs() as logs:
        code, details = await ended_with(channel, method, kind, JUNK)
    assert code == INVALID
    assert details == f"the bytes sent to {method.rpartition('/')[2]} are no message of its kind"
    assert not caplog.records, "no traceback of a library's"
    assert not [entry for entry in logs if entry["log_level"] in ("warning", "error")]
    assert await stack.open_sequences() == 0


async def test_a_message_may_be_as_large_as_its_method_needs(stack: Stack) -> None:
    unknown = b"\xfa\x3f\x80\x80\x10" + bytes(1 << 18)  # an unknown field of 256 KiB
    for service, method in (
        ("target", "/tandem.target.v1.TargetService/GetModelInfo"),
        ("orchestrator", "/grpc.health.v1.Health/Check"),
    ):
        code, details = await ended_with(stack.channels[service], method, "unary", unknown)
        assert code == INVALID
        assert "the limit is 65536" in details
    for service, method in (
        ("drafter", "/tandem.drafter.v1.DrafterService/Draft"),
        ("orchestrator", "/tandem.orchestrator.v1.OrchestratorService/Complete"),
    ):
        kind = METHODS[service][method]
        code, details = await ended_with(stack.channels[service], method, kind, bytes(5 << 20))
        assert code == EXHAUSTED
        assert "larger than max" in details


async def test_what_a_caller_wrote_is_cut_in_what_it_is_answered(stack: Stack) -> None:
    health: Any = health_pb2_grpc.HealthStub(stack.channels["target"])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health.Check(health_pb2.HealthCheckRequest(service="x" * 60_000))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert len(str(refused.value.details())) <= 500


async def test_a_peer_that_refuses_at_once_has_refused(random_pair: tuple[Path, Path]) -> None:
    """While it loads, a service ends streams that our first message is still on its way to."""
    async with AsyncExitStack() as stack:
        service = make_drafter(DrafterSettings(model=str(random_pair[0])))
        never = asyncio.Event()
        loading = await start(stack, type(service)(**{**vars(service), "become_ready": never.wait}))
        client = DrafterClient(address_of(loading))
        stack.push_async_callback(client.close)
        prompt = Prompt("r", [1, 2], Sampling(), 0, 5, 5)

        async def one() -> None:
            call: DraftCall = client.sequence(
                None, PATIENT, TextRecord(), 1 << 20, 1 << 20, ANYBODY
            )
            with pytest.raises(Unavailable, match="is not available"):
                await call.open(prompt)
            call.cancel()

        for _ in range(15):
            await asyncio.gather(*(one() for _ in range(20)))


async def test_an_id_that_the_drafters_vocabulary_lacks_keeps_it_alive(stack: Stack) -> None:
    """Pairs pad their vocabularies differently; the text may use what only the target has."""
    call = Talk(stack.drafter.Draft())
    opening = drafter_pb2.OpenSequence(
        token_ids=[1, 7, 2],
        sampling={"seed": 0},  # type: ignore[arg-type]
        target_vocab_size=8,
        max_new_tokens=20,
    )
    await call.write(drafter_pb2.SequenceRequest(open=opening))
    assert (await call.read()).HasField("opened")
    for round_, position in ((1, 3), (2, 5)):
        step = drafter_pb2.DraftStep(round=round_, position=position, new_token_ids=[6, 4], gamma=3)
        await call.write(drafter_pb2.SequenceRequest(draft=step))
        drafted = (await call.read()).drafted
        assert len(drafted.draft.token_ids) == 3
        assert max(drafted.draft.token_ids) < 5
    call.cancel()


async def test_a_rule_is_offered_only_where_the_drafts_suit_it() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    drafter.pure = False
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request(speculation={"verifier": "greedy_block", "gamma": 4}))
        assert refused.value.code() == INVALID
        assert "use one of ['block', 'token']" in str(refused.value.details())
        assert list((await stub.Complete(request())).token_ids) == target.text(20)
