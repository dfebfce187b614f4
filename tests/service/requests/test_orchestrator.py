"""The orchestrator against fake services: the loop, lost drafters, pairs that do not fit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import pytest

from orchestrator.pool.peers_of_text import PeersOfText
from orchestrator.pool.pool import ReplicaPool
from orchestrator.pool.retry_budget import RetryBudget
from tandem.errors import DrafterLost, StartupError, Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.peers.text.record import TextRecord
from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fakes import (
    FakeDrafter,
    FakeTarget,
    generation,
    orchestrate,
    request,
    serve_fakes,
)


async def test_the_loop() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == target.text(20)
        # 2, then 3456+7 kept with a bonus, then rejections where the count wraps.
        assert list(reply.summary.gammas[:3]) == [0, 4, 4]
        assert reply.summary.accepted_per_position[0] >= reply.summary.accepted_per_position[-1]
    assert (drafter.ended, target.ended) == (1, 1)


async def test_a_resumed_text_goes_on_where_it_stopped() -> None:
    target = FakeTarget()
    async with orchestrate(FakeDrafter(), target) as stub:
        call = stub.Generate(pb.GenerateRequest(generation=generation()))
        rounds = [(await call.read()).round for _ in range(3)]
        call.cancel()
        received = [token.id for round_ in rounds for token in round_.tokens]
        left = {"max_new_tokens": 20 - len(received)}
        resumed = request(prompt_token_ids=[1, *received], first_round=3, stopping=left)
        reply = await stub.Complete(resumed)
        assert [*received, *reply.token_ids] == target.text(20)


async def test_a_lost_drafter_does_not_fail_the_text() -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    async def die(round_: int | None, context: Any) -> None:
        if round_ == 2:
            raise RuntimeError("drafter bug")

    drafter.interfere = die
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == target.text(20)
        assert reply.summary.drafter_lost
        assert list(reply.summary.gammas[:4]) == [0, 4, 0, 0]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stub.Complete(request(speculation={"verifier": "greedy_block", "gamma": 4}))
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "greedy_block cannot go on" in str(ended.value.details())


@pytest.mark.parametrize(
    ("error", "shunned"), [(Unavailable("gone"), True), (DrafterLost("gone"), False)]
)
async def test_a_target_is_shunned_for_its_own_failures_alone(
    error: Unavailable, shunned: bool
) -> None:
    async with serve_fakes(FakeDrafter(), FakeTarget()) as settings:
        pool = ReplicaPool(settings)
        await pool.begin()
        budget = RetryBudget(1.0, lambda: 1)
        peers = PeersOfText(pool, pool.capabilities, None, budget, settings, TextRecord())
        law = pool.capabilities.law
        drafter = pool.pick_drafter(law, "")
        for sequence in (await peers.target(), peers.drafter()):
            assert sequence is not None
            sequence.cancel()
        peers.drafting.note_lost(Unavailable("it is gone"))
        with pytest.raises(Unavailable), peers:
            raise error
        assert drafter is not None
        assert pool.pick_drafter(law, "") is None
        target = pool.targets(pool.capabilities)[0]
        assert (target.shunned, drafter.shunned) == (shunned, True)
        assert (target.load, drafter.load) == (0, 0)
        await pool.close()


@pytest.mark.parametrize("silent_at", [None, 1])
async def test_a_drafter_that_never_answers_is_given_up(silent_at: int | None) -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    async def hang(round_: int | None, context: Any) -> None:
        if round_ == silent_at:
            await asyncio.sleep(60)

    drafter.interfere = hang
    async with orchestrate(drafter, target, draft_seconds=0.2) as stub:
        reply = await stub.Complete(request(), timeout=HANG_SECONDS)
        assert reply.summary.drafter_lost
        assert list(reply.token_ids) == target.text(20)
    assert drafter.ended == drafter.opened
    assert target.ended == 1


async def test_an_eos_ends_the_text_and_ignore_eos_does_not() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(eos_token_ids=[5, 0])) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == [2, 3, 4, 5]
        assert reply.summary.finish_reason == pb.FINISH_REASON_EOS
        going_on = {"max_new_tokens": 20, "ignore_eos": True}
        reply = await stub.Complete(request(stopping=going_on))
        assert len(reply.token_ids) == 20


async def refusal(*fakes: FakeDrafter | FakeTarget, sentence: str, **settings: Any) -> str:
    """What a client is told of a pair that does not fit, once it is known."""
    async with orchestrate(*fakes, ready=False, **settings) as stub:

        async def told() -> str:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Complete(request())
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            details = str(refused.value.details())
            return details if sentence in details else ""

        return str(await until(told))


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        ({"tokenizer_fingerprint": "abc"}, "another tokenizer"),
        ({"vocab_size": 99}, "99 token ids"),
        ({"protocol_version": 1}, "protocol version 1"),
    ],
)
async def test_a_pair_that_does_not_fit_is_refused(
    difference: dict[str, Any], sentence: str
) -> None:
    details = await refusal(FakeDrafter(**difference), FakeTarget(), sentence=sentence)
    assert "a drafter" in details
    assert "127.0.0.1" not in details


async def test_a_target_of_another_release_is_never_ready() -> None:
    await refusal(
        FakeDrafter(), FakeTarget(protocol_version=1), sentence="a target speaks protocol version 1"
    )


async def test_limits_are_those_that_every_replica_keeps() -> None:
    drafters = FakeDrafter(max_gamma=5), FakeDrafter(max_length=300)
    targets = FakeTarget(max_gamma=6), FakeTarget(max_length=400)
    async with orchestrate(*drafters, *targets) as stub:
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.max_gamma == 5
        assert (info.target.max_length, info.target.max_gamma) == (400, 6)
        assert (info.drafter.max_length, info.drafter.max_gamma) == (300, 5)
        for gamma, verifier, limit in ((4, "greedy_block", 300), (4, "block", 400), (0, "", 400)):
            asked = {"gamma": gamma} | ({"verifier": verifier} if verifier else {})
            with pytest.raises(grpc.aio.AioRpcError, match=f"the {limit} tokens"):
                await stub.Complete(request(stopping={"max_new_tokens": limit}, speculation=asked))


async def test_the_drafters_recipes_are_told_each_once() -> None:
    drafters = FakeDrafter(), FakeDrafter(), FakeDrafter()
    drafters[2].recipe = '{"method":"other"}'
    async with orchestrate(*drafters, FakeTarget()) as stub:
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert sorted(info.drafter_recipes) == ['{"method":"fake"}', '{"method":"other"}']


async def test_a_target_that_is_gone_is_named_without_its_address() -> None:
    gone = {"targets": ("127.0.0.1:1",)}
    details = await refusal(FakeDrafter(), sentence="the target is not available", **gone)
    assert "127.0.0.1" not in details


async def test_without_a_drafter_everything_is_plain() -> None:
    async with orchestrate(FakeTarget()) as stub:
        reply = await stub.Complete(request(speculation=None))
        assert reply.summary.rounds == 20
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request())
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("settings", "tokenizer_json", "sentence"),
    [
        ({"verifier": "magic"}, b"", "TANDEM_ORCHESTRATOR_VERIFIER"),
        ({}, b"junk", "cannot read the target's tokenizer"),
        ({"gamma": 9}, b"", "TANDEM_ORCHESTRATOR_GAMMA: 9 is beyond the pair's longest draft of 8"),
    ],
)
async def test_what_the_target_makes_impossible_cannot_start(
    settings: dict[str, Any], tokenizer_json: bytes, sentence: str
) -> None:
    target = FakeTarget()
    target.tokenizer_json = tokenizer_json
    with pytest.raises(StartupError, match=sentence):
        async with orchestrate(FakeDrafter(), target, **settings):
            pass


def test_it_runs_where_torch_and_transformers_are_not_installed() -> None:
    """The whole of this file's loop, in a process in which neither can be imported."""
    script = (
        "import sys, asyncio; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "from tests.service.requests import test_orchestrator as t; asyncio.run(t.test_the_loop())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
