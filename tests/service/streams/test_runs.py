"""Several rounds a message: a run is the rounds one by one, whoever grants them and when."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tandem.target.v1 import target_pb2
from tests.service.conftest import Stack
from tests.service.one_stack import IN_ONE_LOOP, shared_stack, stack
from tests.support.wire.steps import INVALID, WRONG_STATE, open_verify, status_of, verify_step
from tests.support.wire.talk import Talk

__all__ = ["shared_stack", "stack"]  # fixtures

pytestmark = IN_ONE_LOOP

PLAIN = {"draft": None}


def run_step(**changes: Any) -> target_pb2.SequenceRequest:
    fields: dict[str, Any] = {"round": 1, "position": 4, "rounds": 5}
    return target_pb2.SequenceRequest(run=target_pb2.RunStep(**(fields | changes)))


def more(rounds: int) -> target_pb2.SequenceRequest:
    return run_step(round=0, position=0, rounds=rounds)


class Verdicts:
    """The answers to runs, of which a message may hold several."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._waiting: list[target_pb2.Verdict] = []

    async def take(self, count: int) -> list[target_pb2.Verdict]:
        while len(self._waiting) < count:
            message = await self._talk.call.read()
            assert message is not grpc.aio.EOF
            self._waiting += [answer.verdict for answer in message.responses]
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


async def opened(stack: Stack, **changes: Any) -> tuple[Talk, int]:
    """A sequence, and its first token."""
    talk = Talk(stack.target.Verify())
    return talk, (await talk.ask(open_verify(**changes))).opened.token_id


async def one_by_one(stack: Stack, count: int) -> list[int]:
    """The tokens of so many rounds, each asked for by itself."""
    talk, token = await opened(stack)
    tokens = [token]
    for round_ in range(1, count + 1):
        answer = await talk.ask(verify_step(round=round_, position=3 + round_, **PLAIN))
        tokens.append(answer.verdict.next_token_id)
    talk.cancel()
    return tokens


@pytest.mark.parametrize(
    "grants",
    [[[12]], [[1], *[[1]] * 11], [[3, 4], [5]], [[2, 2, 2, 2, 2, 2]], [[6], [0, 6]]],
    ids=["at once", "one by one", "while it is on", "all ahead", "changed to steps in between"],
)
async def test_a_run_is_its_rounds(stack: Stack, grants: list[list[int]]) -> None:
    """Whether rounds are asked for at once, after the others, or amid them."""
    expected = await one_by_one(stack, 12)
    talk, token = await opened(stack)
    verdicts = Verdicts(talk)
    tokens = [token]
    rounds: list[int] = []
    for together in grants:
        last = rounds[-1] if rounds else 0
        if together[0]:
            first = more(together[0]) if last else run_step(rounds=together[0])
            await talk.write(first, *(more(count) for count in together[1:]))
        else:  # a step of its own ends a run, after which another begins
            answer = await talk.ask(verify_step(round=last + 1, position=4 + last, **PLAIN))
            tokens.append(answer.verdict.next_token_id)
            rounds.append(last + 1)
            begun = run_step(round=last + 2, position=5 + last, rounds=together[1] - 1)
            await talk.write(begun)
            together = [together[1] - 1]
        for verdict in await verdicts.take(sum(together)):
            tokens.append(verdict.next_token_id)
            rounds.append(verdict.round)
            assert verdict.position == 4 + verdict.round
            assert (verdict.num_accepted, list(verdict.overlaps)) == (0, [])
            assert verdict.times.forward_ns > 0
        assert verdict.last
    assert tokens == expected
    assert rounds == list(range(1, 13))
    talk.cancel()


async def test_a_run_ends_with_the_text(stack: Stack) -> None:
    """What is granted beyond is without effect, also where it comes later."""
    talk, _ = await opened(stack, max_new_tokens=5)
    await talk.write(run_step(rounds=9))
    verdicts = await Verdicts(talk).take(4)
    assert [verdict.last for verdict in verdicts] == [False, False, False, True]
    await talk.write(more(3))
    await talk.write(target_pb2.SequenceRequest(close=target_pb2.CloseSequence()))
    assert await talk.end() == (grpc.StatusCode.OK, "")
    talk.cancel()


async def test_no_round_follows_an_end_token(stack: Stack) -> None:
    tokens = await one_by_one(stack, 12)
    end = next(token for place, token in enumerate(tokens) if place > 2)
    count = tokens.index(end, 1)
    talk, _ = await opened(stack, end_token_ids=[end])
    await talk.write(run_step(rounds=12))
    verdicts = await Verdicts(talk).take(count)
    assert verdicts[-1].next_token_id == end
    assert verdicts[-1].last
    await talk.write(more(3))
    await talk.write(target_pb2.SequenceRequest(close=target_pb2.CloseSequence()))
    assert await talk.end() == (grpc.StatusCode.OK, "")
    talk.cancel()


async def test_a_close_ends_a_run_between_two_rounds(stack: Stack) -> None:
    talk, _ = await opened(stack, max_new_tokens=400)
    close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
    await talk.write(run_step(rounds=32), close)
    assert await talk.end() == (grpc.StatusCode.OK, "")
    assert await stack.open_sequences() == 0
    talk.cancel()


@pytest.mark.parametrize(
    ("requests", "code", "sentence"),
    [
        ([run_step()], WRONG_STATE, "first message must be open"),
        ([open_verify(), more(1)], WRONG_STATE, "run.round may be 0 only after a run"),
        ([open_verify(), run_step(rounds=0)], INVALID, "run.rounds must be 1..32, got 0"),
        ([open_verify(), run_step(rounds=33)], INVALID, "run.rounds must be 1..32, got 33"),
        ([open_verify(), run_step(position=3)], WRONG_STATE, "position 3"),
        (
            [open_verify(verifier="greedy_block", gamma=3), run_step()],
            INVALID,
            "greedy_block needs a draft of one length in each round",
        ),
        ([open_verify(end_token_ids=[0] * 257)], INVALID, "open.end_token_ids may hold 256"),
    ],
)
async def test_what_is_no_run_is_refused(
    stack: Stack, requests: list[Any], code: grpc.StatusCode, sentence: str
) -> None:
    got, details = await status_of(Talk(stack.target.Verify()), *requests)
    assert (got, sentence in details) == (code, True), (got, details)


@pytest.mark.parametrize(
    ("amid", "code", "sentence"),
    [
        (verify_step(round=40), WRONG_STATE, "before the answer to the one before it"),
        (run_step(round=40, position=40), WRONG_STATE, "run.round must be 0 while a run is on"),
        (more(32), INVALID, "run.rounds must be 1.."),
    ],
    ids=["a step", "another run", "too many rounds"],
)
async def test_amid_a_run_only_more_rounds_may_come(
    stack: Stack, amid: Any, code: grpc.StatusCode, sentence: str
) -> None:
    talk, _ = await opened(stack, max_new_tokens=400)
    await talk.write(run_step(rounds=32), amid)
    while (message := await talk.call.read()) is not grpc.aio.EOF:
        ends = [answer.ended for answer in message.responses if answer.HasField("ended")]
        if ends:
            assert (ends[0].code, sentence in ends[0].sentence) == (code.value[0], True), ends
            break
    assert await stack.open_sequences() == 0
    talk.cancel()


async def test_no_more_is_computed_than_was_granted(stack: Stack) -> None:
    talk, _ = await opened(stack, max_new_tokens=400)
    before = (await stack.target.GetModelInfo(target_pb2.GetModelInfoRequest())).stats
    await talk.write(run_step(rounds=32))
    verdicts = await Verdicts(talk).take(32)
    assert verdicts[-1].last
    after = (await stack.target.GetModelInfo(target_pb2.GetModelInfoRequest())).stats
    assert after.forward_passes - before.forward_passes == 32
    assert (await talk.ask(verify_step(round=33, position=36, **PLAIN))).verdict.position == 37
    talk.cancel()


async def test_runs_of_many_texts_share_their_passes(stack: Stack) -> None:
    """They fall into step by themselves, and none is left behind."""
    talks = [await opened(stack, max_new_tokens=100) for _ in range(4)]
    before = (await stack.target.GetModelInfo(target_pb2.GetModelInfoRequest())).stats
    for talk, _ in talks:
        await talk.write(run_step(rounds=30))
    for talk, _ in talks:
        assert [one.round for one in await Verdicts(talk).take(30)] == list(range(1, 31))
        talk.cancel()
    after = (await stack.target.GetModelInfo(target_pb2.GetModelInfoRequest())).stats
    assert after.forward_passes - before.forward_passes < 2 * 30
