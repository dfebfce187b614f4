"""The orchestrator's metrics of requests: each request is counted once, however it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.front.texts import Texts
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, generation, request
from tests.support.wire.interference import at_round, stand_still
from tests.support.wire.scrape import Metered, metered

DURATION = "gen_ai_server_request_duration_seconds_count"

Ending = Callable[[Metered, FakeTarget], Awaitable[None]]


async def fails(service: Metered, code: grpc.StatusCode, **changes: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await service.stub.Complete(request(**changes))
    assert failed.value.code() == code


async def comes_to_its_length(service: Metered, target: FakeTarget) -> None:
    await service.stub.Complete(request())


async def meets_eos(service: Metered, target: FakeTarget) -> None:
    await service.stub.Complete(request(prompt_token_ids=[50]))


async def meets_a_stop_token(service: Metered, target: FakeTarget) -> None:
    stopping = pb.Stopping(max_new_tokens=20, stop_token_ids=[5])
    await service.stub.Complete(request(stopping=stopping))


async def meets_a_stop_string(service: Metered, target: FakeTarget) -> None:
    stopping = pb.Stopping(max_new_tokens=20, stop_strings=["five"])
    await service.stub.Complete(request(stopping=stopping))


async def is_left_by_its_client(service: Metered, target: FakeTarget) -> None:
    at_round(target, 2, stand_still)
    call = service.stub.Generate(pb.GenerateRequest(generation=generation()))
    await call.read()
    call.cancel()


async def is_left_with_time_to_spare(service: Metered, target: FakeTarget) -> None:
    at_round(target, 2, stand_still)
    call = service.stub.Generate(pb.GenerateRequest(generation=generation()), timeout=50)
    await call.read()
    call.cancel()


async def is_too_slow(service: Metered, target: FakeTarget) -> None:
    at_round(target, 2, stand_still)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await service.stub.Complete(request(), timeout=0.4)
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def is_malformed(service: Metered, target: FakeTarget) -> None:
    sampling = common_pb2.Sampling(temperature=-1)
    await fails(service, grpc.StatusCode.INVALID_ARGUMENT, sampling=sampling)


async def asks_for_too_much(service: Metered, target: FakeTarget) -> None:
    await fails(service, grpc.StatusCode.INVALID_ARGUMENT, stopping={"max_new_tokens": 5000})


async def finds_no_place(service: Metered, target: FakeTarget) -> None:
    async def full(context: FakeContext) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "all places are taken")

    async def interfere(round_: int | None, context: FakeContext) -> None:
        if round_ is None:
            await full(context)

    target.interfere = interfere
    await fails(service, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def loses_its_target(service: Metered, target: FakeTarget) -> None:
    async def lose(context: FakeContext) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    at_round(target, 2, lose)
    await fails(service, grpc.StatusCode.UNAVAILABLE)


async def has_a_target_that_fails(service: Metered, target: FakeTarget) -> None:
    async def fail(context: FakeContext) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "out of memory")

    at_round(target, 2, fail)
    await fails(service, grpc.StatusCode.INTERNAL)


async def meets_a_bug(service: Metered, target: FakeTarget) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Texts, "_describe")
        await fails(service, grpc.StatusCode.INTERNAL)


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        (comes_to_its_length, "OK", "length"),
        (meets_eos, "OK", "eos"),
        (meets_a_stop_token, "OK", "stop_token"),
        (meets_a_stop_string, "OK", "stop_string"),
        (is_left_by_its_client, "CANCELLED", ""),
        (is_left_with_time_to_spare, "CANCELLED", ""),
        (is_too_slow, "DEADLINE_EXCEEDED", ""),
        (is_malformed, "INVALID_ARGUMENT", ""),
        (asks_for_too_much, "INVALID_ARGUMENT", ""),
        (finds_no_place, "RESOURCE_EXHAUSTED", ""),
        (loses_its_target, "UNAVAILABLE", ""),
        (has_a_target_that_fails, "INTERNAL", ""),
        (meets_a_bug, "INTERNAL", ""),
    ],
)
async def test_a_request_is_booked_once(ending: Ending, status: str, reason: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"five": 5, "other": 1}, unk_token="other"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    target = FakeTarget(eos_token_ids=[51])
    target.tokenizer_json = tokenizer.to_str().encode()
    async with metered(FakeDrafter(), target) as service:
        await ending(service, target)
        assert await service.ends(1) == {(status, reason): 1}
        # Nothing comes after it, and a text that is right is one more.
        target.interfere = FakeTarget().interfere
        await service.stub.Complete(request(stopping={"max_new_tokens": 1}))
        assert await service.ends(2) == Counter([(status, reason), ("OK", "length")])
        scraped = await service.scrape()
        error = {} if status == "OK" else {"error_type": status}
        assert scraped.value(DURATION) == 2
        assert scraped.value(DURATION, **error) == (1 if error else 2)
        assert scraped.value("tandem_requests_active") == 0


async def test_places_that_are_taken_are_booked() -> None:
    target = FakeTarget()
    at_round(target, 2, stand_still)
    async with metered(FakeDrafter(), target, max_requests=1) as service:
        call = service.stub.Generate(pb.GenerateRequest(generation=generation()))
        await call.read()
        assert (await service.scrape()).value("tandem_requests_active") == 1
        await fails(service, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert await service.ends(1) == {("RESOURCE_EXHAUSTED", ""): 1}
        call.cancel()
        assert await service.ends(2) == {("RESOURCE_EXHAUSTED", ""): 1, ("CANCELLED", ""): 1}


async def test_a_pair_that_is_not_ready_is_booked() -> None:
    target = FakeTarget(protocol_version=1)
    async with metered(FakeDrafter(), target, ready=False) as service:
        await fails(service, grpc.StatusCode.UNAVAILABLE)
        assert await service.ends(1) == {("UNAVAILABLE", ""): 1}
