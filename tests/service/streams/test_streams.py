"""The two internal protocols, message by message: order, bad input, and what is left behind."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.target.v1 import target_pb2
from tests.service.conftest import Stack, address_of, connect, start
from tests.service.one_stack import IN_ONE_LOOP, shared_stack, stack
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.steps import (
    INVALID,
    WRONG_STATE,
    carry_of,
    draft_step,
    open_draft,
    open_verify,
    status_of,
    verify_step,
)
from tests.support.wire.talk import Talk

__all__ = ["shared_stack", "stack"]  # fixtures

pytestmark = IN_ONE_LOOP

REFUSED_BY_DRAFTERS: list[tuple[list[Any], grpc.StatusCode, str]] = [
    ([draft_step()], WRONG_STATE, "first message must be open"),
    ([open_draft(), open_draft()], WRONG_STATE, "already open"),
    ([drafter_pb2.SequenceRequest()], INVALID, "step must be set"),
    ([open_draft(token_ids=[])], INVALID, "open.token_ids must not be empty"),
    ([open_draft(token_ids=[1, 5])], INVALID, "open.token_ids holds id 5"),
    ([open_draft(request_id="a\nb")], INVALID, "request_id"),
    ([open_draft(request_id="a" * 129)], INVALID, "request_id"),
    ([open_draft(sampling=None)], INVALID, "sampling.seed must be set"),
    ([open_draft(target_vocab_size=0)], INVALID, "open.target_vocab_size"),
    ([open_draft(max_new_tokens=0)], INVALID, "open.max_new_tokens"),
    ([open_draft(max_new_tokens=2000)], INVALID, "open.max_new_tokens"),
    ([open_draft(), draft_step(round=0)], WRONG_STATE, "round 0"),
    ([open_draft(), draft_step(), draft_step(position=4)], WRONG_STATE, "round 1"),
    ([open_draft(), draft_step(position=2)], WRONG_STATE, "position 2"),
    ([open_draft(), draft_step(gamma=0)], INVALID, "draft.gamma"),
    ([open_draft(), draft_step(gamma=9)], INVALID, "draft.gamma"),
    ([open_draft(), draft_step(new_token_ids=[])], INVALID, "draft.new_token_ids"),
    ([open_draft(), draft_step(new_token_ids=[9])], INVALID, "draft.new_token_ids"),
    ([open_draft(), draft_step(new_token_ids=[1] * 21)], INVALID, "draft.new_token_ids"),
]


async def test_drafter_refuses(stack: Stack) -> None:
    for requests, code, sentence in REFUSED_BY_DRAFTERS:
        bystander = Talk(stack.drafter.Draft())
        await bystander.write(open_draft())
        await bystander.read()
        got, details = await status_of(Talk(stack.drafter.Draft()), *requests)
        assert (got, sentence in details) == (code, True), (sentence, got, details)
        await bystander.write(draft_step())
        assert len((await bystander.read()).drafted.draft.token_ids) == 3, sentence
        assert await stack.open_sequences() == 1, sentence
        await bystander.write(close_of(drafter_pb2))
        assert (await bystander.end())[0] == grpc.StatusCode.OK, sentence
        assert await stack.open_sequences() == 0, sentence


REFUSED_BY_TARGETS: list[tuple[list[Any], grpc.StatusCode, str]] = [
    ([verify_step()], WRONG_STATE, "first message must be open"),
    ([open_verify(), open_verify()], WRONG_STATE, "already open"),
    ([target_pb2.SequenceRequest()], INVALID, "step must be set"),
    ([open_verify(token_ids=[])], INVALID, "open.token_ids must not be empty"),
    ([open_verify(token_ids=[7])], INVALID, "open.token_ids holds id 7"),
    ([open_verify(verifier="magic")], INVALID, "open.verifier 'magic' is unknown"),
    ([open_verify(verifier="")], INVALID, "open.verifier"),
    ([open_verify(gamma=3)], INVALID, "open.gamma must be 0"),
    ([open_verify(verifier="greedy_block")], INVALID, "open.gamma must be 1..8"),
    ([open_verify(max_new_tokens=0)], INVALID, "open.max_new_tokens"),
    ([open_verify(max_new_tokens=510)], INVALID, "open.max_new_tokens"),
    ([open_verify(sampling=None)], INVALID, "sampling.seed must be set"),
    (
        [open_verify(sampling=common_pb2.Sampling(seed=0, top_p=0.0))],
        INVALID,
        "sampling.top_p",
    ),
    (
        [open_verify(carry=carry_of(0.0, 1))],
        INVALID,
        "open.carry",
    ),
    ([open_verify(), verify_step(round=0)], WRONG_STATE, "round 0"),
    ([open_verify(), verify_step(position=3)], WRONG_STATE, "position 3"),
    (
        [open_verify(), verify_step(draft=common_pb2.Draft(token_ids=[5]))],
        INVALID,
        "draft.token_ids holds id 5",
    ),
    (
        [open_verify(), verify_step(draft=common_pb2.Draft(token_ids=[1] * 9))],
        INVALID,
        "draft.token_ids",
    ),
    (
        [
            open_verify(),
            verify_step(draft=common_pb2.Draft(token_ids=[1, 2], parents=[0, 0])),
        ],
        INVALID,
        "draft.parents: open announced no max_nodes",
    ),
    (
        [open_verify(verifier="greedy_block", gamma=3), verify_step()],
        INVALID,
        "greedy_block needs 3",
    ),
]


async def test_target_refuses(stack: Stack) -> None:
    for requests, code, sentence in REFUSED_BY_TARGETS:
        bystander = Talk(stack.target.Verify())
        await bystander.write(open_verify())
        await bystander.read()
        got, details = await status_of(Talk(stack.target.Verify()), *requests)
        assert (got, sentence in details) == (code, True), (sentence, got, details)
        await bystander.write(verify_step())
        assert (await bystander.read()).verdict.position > 4, sentence
        assert await stack.open_sequences() == 1, sentence
        await bystander.write(close_of(target_pb2))
        assert (await bystander.end())[0] == grpc.StatusCode.OK, sentence
        assert await stack.open_sequences() == 0, sentence


async def test_who_is_not_the_one_that_is_counted_on_refuses(stack: Stack) -> None:
    """An address may be another service's by the time that a sequence opens."""
    for stub, call, opening in (
        (stack.target, stack.target.Verify, open_verify),
        (stack.drafter, stack.drafter.Draft, open_draft),
    ):
        kind = target_pb2 if stub is stack.target else drafter_pb2
        info = (await stub.GetModelInfo(kind.GetModelInfoRequest())).info
        assert len(info.fingerprint) == 64
        assert {each.sequences for each in info.pass_times} >= {1, 4}
        assert all(each.rows and each.nanoseconds for each in info.pass_times)
        talk = Talk(call())
        assert (await talk.ask(opening(fingerprint=info.fingerprint))).HasField("opened")
        code, sentence = await refused(call, opening(fingerprint="0" * 64))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "open.fingerprint: 000000000000 is expected here" in sentence
        await talk.write(close_of(kind))
        assert (await talk.end())[0] == grpc.StatusCode.OK
    assert await stack.open_sequences() == 0


async def refused(call: Any, opening: Any) -> tuple[grpc.StatusCode, str]:
    talk = Talk(call())
    await talk.write(opening)
    return await talk.end()


def close_of(kind: Any) -> Any:
    return kind.SequenceRequest(close=kind.CloseSequence())


async def test_the_last_round_there_is_does_nobody_harm(stack: Stack) -> None:
    """Numbers are computed for many rounds and many sequences at once."""
    bystander, last = Talk(stack.target.Verify()), Talk(stack.target.Verify())
    for call in (bystander, last):
        await call.write(open_verify())
        await call.read()
    await last.write(verify_step(round=2**64 - 1))
    await bystander.write(verify_step())
    for call, round_ in ((last, 2**64 - 1), (bystander, 1)):
        assert (await call.read()).verdict.round == round_
        call.cancel()


async def test_a_carry_that_no_target_returns_is_refused(stack: Stack) -> None:
    for carry in (carry_of(-100.0, 1), carry_of(float("nan"), 1), carry_of(0.0, 3)):
        opening = open_verify(verifier="greedy_block", gamma=3, carry=carry)
        code, details = await status_of(Talk(stack.target.Verify()), opening)
        assert (code, "open.carry" in details) == (INVALID, True)
    levels = common_pb2.VerifierCarry(levels=[common_pb2.VerifierCarry.Level()] * 1000)
    opening = open_verify(verifier="greedy_block", gamma=3, carry=levels)
    code, details = await status_of(Talk(stack.target.Verify()), opening)
    assert (code, "holds 1000 levels" in details) == (INVALID, True)


async def test_close_ends_the_sequence_with_ok(stack: Stack) -> None:
    close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
    call = Talk(stack.target.Verify())
    await call.write(open_verify())
    await call.read()
    await call.write(close)
    assert await call.end() == (grpc.StatusCode.OK, "")
    assert await stack.open_sequences() == 0
    await call.call.done_writing()
    assert await call.call.read() is grpc.aio.EOF
    assert await call.call.code() == grpc.StatusCode.OK


async def test_an_end_without_close_frees_the_sequence_too(stack: Stack) -> None:
    call = Talk(stack.drafter.Draft())
    assert await status_of(call, open_draft()) == (grpc.StatusCode.OK, "")
    assert await stack.open_sequences() == 0


async def test_one_sequence_too_many_is_refused_and_the_rest_go_on(stack: Stack) -> None:
    calls = [Talk(stack.target.Verify()) for _ in range(4)]
    for call in calls:
        await call.write(open_verify())
        await call.read()
    code, details = await status_of(Talk(stack.target.Verify()), open_verify())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "all 4 sequences are taken" in details
    for call in calls:
        await call.write(verify_step())
        assert (await call.read()).verdict.round == 1
        call.cancel()
    for _ in range(100):
        if not await stack.open_sequences():
            break
        await asyncio.sleep(0.01)
    code, _ = await status_of(Talk(stack.target.Verify()), open_verify())
    assert code == grpc.StatusCode.OK


async def test_a_resumed_greedy_block_waits_for_a_draft(stack: Stack) -> None:
    """Its carry modifies the next position, where the drafter's distribution is needed."""
    carry = carry_of(0.3, 2)
    call = Talk(stack.target.Verify())
    await call.write(open_verify(verifier="greedy_block", gamma=3, carry=carry, first_round=7))
    opened = (await call.read()).opened
    assert not opened.HasField("token_id")
    draft = common_pb2.Draft(token_ids=[0, 1, 2])
    await call.write(verify_step(round=8, position=3, draft=draft))
    verdict = (await call.read()).verdict
    assert verdict.position == 3 + verdict.num_accepted + 1
    call.cancel()


async def test_a_stream_ends_with_a_status_while_an_answer_is_on_its_way(stack: Stack) -> None:
    """gRPC sends none while a write is on its way: the caller would wait for it for ever."""
    opening, step = open_verify(), verify_step()
    opening.sequence = step.sequence = 1
    for _ in range(40):
        call = stack.target.Verify()
        await call.write(target_pb2.VerifyRequest(requests=[opening, step]))
        await call.done_writing()
        async with asyncio.timeout(HANG_SECONDS):
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() == grpc.StatusCode.OK


async def test_a_silent_sequence_is_ended(random_pair: tuple[Path, Path]) -> None:
    async with AsyncExitStack() as stack:
        settings = DrafterSettings(model=str(random_pair[0]), idle_seconds=0.3)
        server = await start(stack, make_drafter(settings))
        channel = await connect(stack, address_of(server))
        stub: Any = drafter_pb2_grpc.DrafterServiceStub(channel)
        await server.ready()
        call = Talk(stub.Draft())
        await call.write(open_draft())
        await call.read()
        code, sentence = await call.end()
        assert code == grpc.StatusCode.ABORTED
        assert "0.3 s" in sentence
        info = await stub.GetModelInfo(drafter_pb2.GetModelInfoRequest())
        assert info.stats.open_sequences == 0


async def test_only_new_tokens_are_fed(stack: Stack) -> None:
    """One target pass a round; the drafter computes what it has not computed yet."""

    async def computed() -> np.ndarray:
        """Passes and tokens so far."""
        info = await stack.drafter.GetModelInfo(drafter_pb2.GetModelInfoRequest())
        return np.array([info.stats.forward_passes, info.stats.fed_tokens])

    before = await computed()
    call = Talk(stack.drafter.Draft())
    await call.write(open_draft())
    await call.read()
    await call.write(draft_step())
    drafted = list((await call.read()).drafted.draft.token_ids)
    drafting = await computed()
    assert (drafting - before).tolist() == [1 + 3, 3 + 3]
    # All kept: the last drafted token and the bonus are new to the cache.
    await call.write(draft_step(round=2, position=4, new_token_ids=[*drafted, 0], gamma=1))
    await call.read()
    assert (await computed() - drafting).tolist() == [1, 2]
    call.cancel()
