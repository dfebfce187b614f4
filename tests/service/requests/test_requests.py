"""Clients' requests and behaviour, over fake services: nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import grpc
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.text.codec import TextCodec
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fakes import FakeDrafter, FakeTarget, generation, orchestrate, request

LENGTH = 1000


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt": "text"}, "prompt"),
        ({"prompt_token_ids": [], "prompt": ""}, "prompt must not be empty"),
        ({"prompt_token_ids": [], "prompt": "text"}, "no tokenizer"),
        ({"prompt_token_ids": [1, 100]}, "prompt_token_ids holds id 100"),
        ({"prompt_token_ids": [1] * (LENGTH + 1)}, "prompt_token_ids: a sequence may hold 1000"),
        ({"stopping": pb.Stopping(max_new_tokens=LENGTH)}, "max_new_tokens"),
        ({"stopping": pb.Stopping(max_new_tokens=0)}, "max_new_tokens"),
        ({"stopping": pb.Stopping(stop_token_ids=[100])}, "stop_token_ids"),
        ({"stopping": pb.Stopping(stop_token_ids=[1] * 65)}, "stop_token_ids"),
        ({"stopping": pb.Stopping(stop_strings=["a"])}, "stop_strings"),
        ({"stopping": pb.Stopping(stop_strings=[""])}, "stop_strings"),
        ({"stopping": pb.Stopping(stop_strings=["a"] * 17)}, "stop_strings"),
        ({"sampling": common_pb2.Sampling(temperature=-1)}, "sampling.temperature"),
        ({"sampling": common_pb2.Sampling(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": common_pb2.Sampling(temperature=float("inf"))}, "sampling.temperature"),
        ({"sampling": common_pb2.Sampling(top_p=0)}, "sampling.top_p"),
        ({"sampling": common_pb2.Sampling(top_p=1.1)}, "sampling.top_p"),
        ({"sampling": common_pb2.Sampling(min_p=-0.1)}, "sampling.min_p"),
        ({"sampling": common_pb2.Sampling(min_p=1.1)}, "sampling.min_p"),
        ({"speculation": pb.Speculation(verifier="magic")}, "verifier 'magic' is unknown"),
        ({"speculation": pb.Speculation(gamma=9)}, "gamma must be 0..8"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"first_round": 2**62 + 1}, "first_round"),
        (
            {"first_round": 3, "speculation": {"gamma": 3, "verifier": "greedy_block"}},
            "first_round: a greedy_block text",
        ),
        ({"speculation": {"verifier": "x" * 20_000}}, "verifier"),
    ],
)
async def test_bad_input_names_its_field_and_opens_nothing(
    changes: dict[str, Any], sentence: str
) -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request(**changes))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in str(refused.value.details())
        # A text that is right comes after it on the same channel, and opens the first sequences.
        await stub.Complete(request())
    assert (drafter.opened, target.opened) == (1, 1)


async def test_prompts_are_encoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    target = FakeTarget()
    target.tokenizer_json = tokenizer.to_str().encode()
    threads = []
    encode = TextCodec.encode

    def spy(codec: TextCodec, text: str, special: bool) -> list[int]:
        threads.append(threading.current_thread())
        return encode(codec, text, special)

    monkeypatch.setattr(TextCodec, "encode", spy)
    async with orchestrate(FakeDrafter(), target) as stub:
        reply = await stub.Complete(request(prompt_token_ids=[], prompt="a b"))
    assert list(reply.token_ids) == target.text(20, last=2)
    assert threads
    assert threading.current_thread() not in threads


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 1}, unk_token="a"))
    target = FakeTarget()
    target.tokenizer_json = tokenizer.to_str().encode()
    encoded: list[str] = []

    def spy(codec: TextCodec, text: str, special: bool) -> list[int]:
        encoded.append(text)
        return [1]

    monkeypatch.setattr(TextCodec, "encode", spy)
    async with orchestrate(FakeDrafter(), target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request(prompt_token_ids=[], prompt="a" * (1000 * LENGTH + 1)))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "1000001 characters cannot fit into 1000 tokens" in str(refused.value.details())
    assert not encoded


async def _admitted(stub: Any) -> pb.CompleteResponse:
    """A text, as soon as there is a place for it: calls end a moment after their sequences."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            try:
                return cast(pb.CompleteResponse, await stub.Complete(request()))
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await asyncio.sleep(0.02)


async def test_a_client_that_never_reads_is_left() -> None:
    drafter, target = FakeDrafter(max_length=10**6), FakeTarget(max_length=10**6)
    # A small window, so that the text stands still at once.
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with orchestrate(
        drafter, target, channel_options=window, idle_seconds=0.3, max_requests=1
    ) as stub:
        endless = generation(stopping={"max_new_tokens": 10**5})
        call = stub.Generate(pb.GenerateRequest(generation=endless))
        events = aiter(call)
        await anext(events)
        await until(lambda: (drafter.ended, target.ended) == (1, 1))
        # Its place is free again before it has read its status.
        assert (await _admitted(stub)).summary.new_tokens == 20
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            _ = [event async for event in events]
        assert ended.value.code() == grpc.StatusCode.ABORTED
        assert "read nothing for 0.3 s" in str(ended.value.details())


async def test_a_slow_client_is_waited_for() -> None:
    target = FakeTarget()
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with orchestrate(FakeDrafter(), target, channel_options=window, idle_seconds=3) as stub:
        call = stub.Generate(pb.GenerateRequest(generation=generation()))
        reads = 0
        ids = []
        while (event := await call.read()) is not grpc.aio.EOF:
            ids += [token.id for token in event.round.tokens]
            reads += 1
            await asyncio.sleep(0.5)
        assert ids == target.text(20)
        assert reads * 0.5 > 3, "in all it waited longer than a client may be silent"


async def test_a_deadline_frees_both_services() -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    async def hang(round_: int | None, context: Any) -> None:
        if round_ == 3:
            await asyncio.sleep(60)

    target.interfere = hang
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stub.Complete(request(), timeout=0.5)
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: (drafter.ended, target.ended) == (1, 1))


async def test_one_text_too_many_is_refused_at_once() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    async with orchestrate(drafter, target, max_requests=1) as stub:
        going = asyncio.Event()

        async def hang(round_: int | None, context: Any) -> None:
            going.set()
            await asyncio.sleep(60)

        target.interfere = hang
        call = stub.Complete(request())
        await going.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request())
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert target.opened == 1
        call.cancel()
