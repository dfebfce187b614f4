"""The public service over real engines: what a client sends, sees and leaves behind."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.service.conftest import Stack
from tests.service.one_stack import IN_ONE_LOOP, shared_stack, stack
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.steps import open_draft
from tests.support.wire.talk import Talk

__all__ = ["shared_stack", "stack"]  # fixtures

pytestmark = IN_ONE_LOOP


def generation(**changes: Any) -> pb.Generation:
    fields: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "sampling": common_pb2.Sampling(seed=0),
        "stopping": pb.Stopping(max_new_tokens=16),
        "speculation": pb.Speculation(gamma=3),
    }
    return pb.Generation(**(fields | changes))


async def complete(stack: Stack, message: pb.Generation) -> pb.CompleteResponse:
    reply: pb.CompleteResponse = await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=message), timeout=HANG_SECONDS
    )
    return reply


async def stream(stack: Stack, message: pb.Generation) -> tuple[list[pb.Round], pb.Summary]:
    call = stack.orchestrator.Generate(pb.GenerateRequest(generation=message), timeout=HANG_SECONDS)
    events = [event async for event in call]
    return [event.round for event in events[:-1]], events[-1].summary


async def test_rounds_are_atomic_and_add_up(stack: Stack) -> None:
    rounds, summary = await stream(stack, generation())
    assert [r.round for r in rounds] == list(range(len(rounds)))
    assert sum(len(r.tokens) for r in rounds) == summary.new_tokens == 16
    assert [r.gamma for r in rounds] == list(summary.gammas)
    assert summary.rounds == len(rounds)
    for r in rounds:
        *accepted, last = [token.origin for token in r.tokens]
        assert all(origin == pb.TOKEN_ORIGIN_ACCEPTED for origin in accepted)
        complete_ = len(accepted) == r.gamma
        assert last == (pb.TOKEN_ORIGIN_BONUS if complete_ else pb.TOKEN_ORIGIN_CORRECTION)
    accepted_count = sum(len(r.tokens) - 1 for r in rounds)
    assert summary.accepted_tokens == accepted_count == sum(summary.accepted_per_position)
    drafted_rounds = [r for r in rounds if r.gamma]
    assert summary.block_efficiency == pytest.approx(
        sum(len(r.tokens) for r in drafted_rounds) / len(drafted_rounds)
    )
    assert summary.finish_reason == pb.FINISH_REASON_LENGTH


async def test_both_calls_and_a_replay_give_the_same_tokens(stack: Stack) -> None:
    """Everything needed for the replay of a seedless request is in its last message."""
    first = await complete(stack, generation(sampling=common_pb2.Sampling(temperature=0.8)))
    effective = first.summary.effective
    again = pb.Generation(
        prompt_token_ids=[1, 2, 3],
        sampling=effective.sampling,
        stopping=effective.stopping,
        speculation=effective.speculation,
    )
    rounds, _ = await stream(stack, again)
    assert [token.id for r in rounds for token in r.tokens] == list(first.token_ids)
    assert (
        len(
            {
                (await complete(stack, generation(sampling={"seed": s}))).token_ids[2]
                for s in range(12)
            }
        )
        > 1
    )


@pytest.mark.parametrize("verifier", ["token", "block", "greedy_block"])
async def test_the_same_alone_and_beside_others(stack: Stack, verifier: str) -> None:
    message = generation(speculation={"gamma": 3, "verifier": verifier}, sampling={"seed": 0})
    alone = await complete(stack, message)
    others = [generation(sampling={"seed": seed}) for seed in (7, 8, 9)]
    beside, *_ = await asyncio.gather(*(complete(stack, m) for m in [message, *others]))
    assert beside.token_ids == alone.token_ids
    assert beside.summary.gammas == alone.summary.gammas


async def test_a_resumed_text_goes_on_where_it_stopped(stack: Stack) -> None:
    """Greedily the whole is the same; with the next round's number, so that none is used twice."""
    greedy = common_pb2.Sampling(temperature=0, seed=0)
    rounds, _ = await stream(stack, generation(sampling=greedy))
    ids = [token.id for r in rounds for token in r.tokens]
    received = [token.id for r in rounds[:3] for token in r.tokens]
    resumed = generation(
        prompt_token_ids=[1, 2, 3, *received],
        sampling=greedy,
        stopping=pb.Stopping(max_new_tokens=16 - len(received)),
        first_round=rounds[2].round + 1,
    )
    resumed_rounds, summary = await stream(stack, resumed)
    assert resumed_rounds[0].round == summary.effective.first_round == 3
    assert received + [token.id for r in resumed_rounds for token in r.tokens] == ids


async def test_gamma_0_is_plain_decoding(stack: Stack) -> None:
    reply = await complete(stack, generation(speculation={"gamma": 0}))
    assert reply.summary.rounds == 16
    assert reply.summary.drafted_tokens == 0
    assert set(reply.origins) == {pb.TOKEN_ORIGIN_BONUS}


async def test_a_stop_token_ends_the_text_wherever_it_comes(stack: Stack) -> None:
    plain = await complete(stack, generation())
    stop = plain.token_ids[6]
    reply = await complete(stack, generation(stopping={"stop_token_ids": [stop]}))
    end = list(plain.token_ids).index(stop) + 1
    assert list(reply.token_ids) == list(plain.token_ids)[:end]
    assert reply.summary.finish_reason == pb.FINISH_REASON_STOP_TOKEN
    assert reply.summary.new_tokens == end


@pytest.mark.parametrize("verifier", ["token", "block", "greedy_block"])
async def test_the_length_is_kept_to_the_token(stack: Stack, verifier: str) -> None:
    for count in (1, 2, 3, 5):
        message = generation(
            stopping={"max_new_tokens": count}, speculation={"gamma": 4, "verifier": verifier}
        )
        reply = await complete(stack, message)
        assert len(reply.token_ids) == count
        assert reply.summary.finish_reason == pb.FINISH_REASON_LENGTH


async def test_stage_times_add_up_to_the_clients_wall_time(stack: Stack) -> None:
    loop = asyncio.get_running_loop()
    message = generation(stopping={"max_new_tokens": 200})
    await complete(stack, message)
    started = loop.time()
    stages = (await complete(stack, message)).summary.stages
    wall_ns = (loop.time() - started) * 1e9
    exclusive = sum(
        getattr(stages, field.name)
        for field in pb.Stages.DESCRIPTOR.fields
        if field.name.endswith("_wait_ns")
        or field.name in ("tokenize_ns", "detokenize_ns", "own_ns")
    )
    assert exclusive == pytest.approx(stages.total_ns, rel=0.05)
    assert exclusive == pytest.approx(wall_ns, rel=0.05)
    busy = stages.draft_forward_busy_ns + stages.verify_forward_busy_ns
    assert 0 < busy < stages.draft_wait_ns + stages.verify_wait_ns


async def test_a_client_that_leaves_frees_both_services(stack: Stack) -> None:
    call = stack.orchestrator.Generate(
        pb.GenerateRequest(generation=generation(stopping={"max_new_tokens": 400}))
    )
    await call.read()
    assert await stack.open_sequences() == 2
    call.cancel()
    for _ in range(50):
        if not await stack.open_sequences():
            return
        await asyncio.sleep(0.02)
    pytest.fail("sequences still open a second after the client left")


async def test_too_many_texts_for_the_drafter_go_on_undrafted(stack: Stack) -> None:
    """The drafter's places are taken: the target alone still serves the text."""
    drafter_calls = []
    for _ in range(4):
        call = Talk(stack.drafter.Draft())
        await call.write(open_draft())
        await call.read()
        drafter_calls.append(call)
    reply = await complete(stack, generation(sampling=common_pb2.Sampling()))
    assert reply.summary.drafter_lost
    assert len(reply.token_ids) == 16
    speculation = {"gamma": 3, "verifier": "greedy_block"}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await complete(stack, generation(sampling=None, speculation=speculation))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "greedy_block" in str(refused.value.details())
    for call in drafter_calls:
        call.cancel()
