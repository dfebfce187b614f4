"""A client says how much of a text it has received: it gets the rest, and nothing twice."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.faults.campaign.front import ids_of, speaking_target
from tests.service.conftest import Stack, stack
from tests.support.processes.services import generation
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

__all__ = ["stack"]  # a fixture of other tests


async def test_a_sampled_text_is_the_fault_free_one_where_nothing_is_drafted(stack: Stack) -> None:
    """A round without a draft draws the same token from a prefill: its numbers are the round's."""
    fields: dict[str, Any] = {"max_new_tokens": 30, "gamma": 0, "seed": 11}
    whole = await _rounds(stack, generation([1, 2, 3], **fields))
    for cut in (1, 7, 29):
        wanted = generation([1, 2, 3], **fields)
        wanted.received_token_ids.extend(ids_of(whole[:cut]))
        wanted.first_round = whole[cut - 1].round + 1
        assert ids_of(await _rounds(stack, wanted)) == ids_of(whole[cut:])


async def _rounds(stack: Stack, wanted: pb.Generation) -> list[pb.Round]:
    replies = stack.orchestrator.Generate(pb.GenerateRequest(generation=wanted))
    return [reply.round async for reply in replies if reply.HasField("round")]


def received(count: int, **changes: Any) -> pb.CompleteRequest:
    """A text of the fakes, of which so many tokens came."""
    ids = FakeTarget().text(count)
    return request(**({"received_token_ids": ids, "first_round": 9} | changes))


async def test_all_that_came_counts_and_none_comes_again() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget()) as stub:
        reply = await stub.Complete(received(12))
        assert list(reply.token_ids) == FakeTarget().text(20)[12:]
        assert reply.summary.new_tokens == 8
        assert reply.summary.effective.first_round == 9


@pytest.mark.parametrize("cut", range(1, 6))
async def test_a_stop_string_across_the_break_ends_the_text(cut: int) -> None:
    """Its first half came before, and its text was held back."""
    async with orchestrate(FakeDrafter(), speaking_target([])) as stub:
        fields = {"stopping": {"max_new_tokens": 20, "stop_strings": ["f ag ah"]}}
        replies = stub.Generate(pb.GenerateRequest(generation=request(**fields).generation))
        tokens = [token async for reply in replies for token in reply.round.tokens]
        texts = [token.text for token in tokens]
        assert "".join(texts).split() == ["ac", "ad", "ae", "a"]
        ids = [token.id for token in tokens]
        assert len(ids) == 6 > cut
        rest = await stub.Complete(request(received_token_ids=ids[:cut], first_round=50, **fields))
        assert list(rest.token_ids) == ids[cut:]
        assert rest.summary.stop_string == "f ag ah"
        assert rest.text == "".join(texts[cut:])


async def test_a_text_that_never_drafted_owes_its_rule_nothing() -> None:
    """It was too long for the drafter, say: with gamma 0 it goes on under any rule."""
    plain = {"verifier": "greedy_block", "gamma": 0}
    async with orchestrate(FakeDrafter(), FakeTarget()) as stub:
        reply = await stub.Complete(received(12, speculation=plain))
        assert list(reply.token_ids) == FakeTarget().text(20)[12:]


async def test_a_text_that_is_over_already_has_its_summary_alone() -> None:
    """Its last round came, and its summary did not."""
    target = FakeTarget(eos_token_ids=[5])
    async with orchestrate(FakeDrafter(), target) as stub:
        for ids, reason in (
            (FakeTarget().text(20), pb.FINISH_REASON_LENGTH),
            (FakeTarget().text(4), pb.FINISH_REASON_EOS),
        ):
            ignore = {"max_new_tokens": 20, "ignore_eos": reason == pb.FINISH_REASON_LENGTH}
            reply = await stub.Complete(
                request(received_token_ids=ids, first_round=9, stopping=ignore)
            )
            assert not reply.token_ids
            assert reply.summary.finish_reason == reason
    assert target.opened == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"first_round": None}, "received_token_ids needs first_round"),
        ({"received_token_ids": [1] * 21}, "received_token_ids may hold 20 ids"),
        ({"received_token_ids": [100]}, "received_token_ids holds id 100"),
        ({"received_token_ids": [2, 5, 6]}, "the text ends with token 2 of them"),
        (
            {"speculation": {"verifier": "greedy_block", "gamma": 2}},
            "cannot be resumed.*give gamma 0",
        ),
    ],
)
async def test_what_cannot_have_come_is_refused(changes: dict[str, Any], sentence: str) -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(eos_token_ids=[5])) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as refused:
            await stub.Complete(received(3, **changes))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
