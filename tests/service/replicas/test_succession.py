"""A target that is lost in the middle of a text: another target continues the text."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.text.contracts import News, Prompt
from tandem.peers.text.record import TextRecord
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, start
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import ANYBODY, PATIENT, FakeDrafter, FakeTarget, orchestrate, request

GREEDY_BLOCK = {"verifier": "greedy_block", "gamma": 4}


def carry_of(round_: int) -> common_pb2.VerifierCarry:
    """One that tells of which round it is."""
    level = common_pb2.VerifierCarry.Level(log_ratio=round_ / 8, count=2)
    return common_pb2.VerifierCarry(levels=[level])


class Pair:
    """Two targets, of which whichever serves first is lost at a round."""

    def __init__(self, at: int | None, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self.targets = FakeTarget(), FakeTarget()
        self.seen: list[tuple[int, target_pb2.VerifyStep]] = []
        self._lost: FakeContext | None = None
        for target in self.targets:

            async def lose(round_: int | None, context: FakeContext) -> None:
                if round_ == at and self._lost is None:
                    self._lost = context
                    await context.abort(code, "gone")

            target.interfere = lose

    @property
    def openings(self) -> list[target_pb2.OpenSequence]:
        """Of both; the lost one's first."""
        return sorted(
            (opening for target in self.targets for opening in target.openings),
            key=lambda opening: opening.first_round,
        )


@pytest.mark.parametrize("at", [None, 1, 3])
async def test_another_target_goes_on_from_what_was_emitted(at: int | None) -> None:
    pair, drafter = Pair(at), FakeDrafter()
    async with orchestrate(drafter, *pair.targets) as stub:
        call = await stub.Complete(request())
    expected = pair.targets[0].text(20)
    assert list(call.token_ids) == expected
    assert not call.summary.drafter_lost
    last = pair.openings[-1]
    if at is not None:
        first = pair.openings[0]
        # The lost round's number is not used again.
        assert (first.first_round, last.first_round) == (0, at + 1)
        emitted = len(last.token_ids) - 1
        assert list(last.token_ids) == [1, *expected[:emitted]]
        assert last.max_new_tokens == 20 - emitted
        assert last.sampling.seed == first.sampling.seed
        # Its draft was decided by nobody; the next target's prefill gave a token instead.
        assert list(call.summary.gammas)[at] == 0
    assert sum(target.ended for target in pair.targets) == 2
    assert drafter.ended == 1


async def test_the_carry_is_handed_on_and_the_draft_with_it() -> None:
    """A carry modifies the next position, so its rows are needed there: the draft stays."""
    pair, drafter = Pair(3), FakeDrafter()

    def owe(reply: Any) -> None:
        if reply.HasField("verdict"):
            reply.verdict.carry.CopyFrom(carry_of(reply.verdict.round))

    for target in pair.targets:
        target.alter = owe
    async with orchestrate(drafter, *pair.targets) as stub:
        reply = await stub.Complete(request(speculation=GREEDY_BLOCK))
    assert list(reply.token_ids) == pair.targets[0].text(20)
    first, last = pair.openings
    assert not first.HasField("carry")
    assert last.carry == carry_of(2)
    assert last.gamma == 4
    assert list(reply.summary.gammas)[3] == 4


async def test_without_another_target_the_text_fails() -> None:
    target, tries = FakeTarget(), 0

    async def lose(round_: int | None, context: FakeContext) -> None:
        nonlocal tries
        if round_ == 2:
            tries += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    target.interfere = lose
    async with orchestrate(FakeDrafter(), target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request())
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert (tries, target.opened) == (1, 1)


async def test_each_target_is_tried_twice_at_most() -> None:
    targets = FakeTarget(), FakeTarget(), FakeTarget()

    async def lose(round_: int | None, context: FakeContext) -> None:
        if round_ is None or round_ > 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    for target in targets:
        target.interfere = lose
    async with orchestrate(FakeDrafter(), *targets) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request())
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert all(1 <= target.opened <= 2 for target in targets)


async def test_a_target_that_finds_fault_is_not_replaced() -> None:
    """Its refusal may be of the draft, and a draft that is withdrawn for what it is biases."""
    pair = Pair(2, grpc.StatusCode.INVALID_ARGUMENT)
    async with orchestrate(FakeDrafter(), *pair.targets) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request())
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert sum(target.opened for target in pair.targets) == 1


async def test_a_hung_target_is_replaced() -> None:
    pair, hung = Pair(99), 0

    async def hang(round_: int | None, context: FakeContext) -> None:
        nonlocal hung
        if round_ == 2 and not hung:
            hung += 1
            await asyncio.sleep(60)

    for target in pair.targets:
        target.interfere = hang
    async with orchestrate(FakeDrafter(), *pair.targets, verify_seconds=0.3) as stub:
        reply = await stub.Complete(request(), timeout=HANG_SECONDS)
    assert list(reply.token_ids) == pair.targets[0].text(20)


async def test_a_successor_that_is_full_is_passed_over() -> None:
    """When a target dies, its texts come to the others all at once."""
    targets = FakeTarget(), FakeTarget(), FakeTarget()
    lost: list[FakeTarget] = []

    def losing(target: FakeTarget) -> Any:
        async def interfere(round_: int | None, context: FakeContext) -> None:
            if round_ == 2 and not lost:
                lost.append(target)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if round_ is None and len(lost) == 1:
                lost.append(target)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "all places are taken")

        return interfere

    for target in targets:
        target.interfere = losing(target)
    async with orchestrate(FakeDrafter(), *targets) as stub:
        reply = await stub.Complete(request())
    assert list(reply.token_ids) == targets[0].text(20)
    assert sorted(target.opened for target in targets) == [1, 1, 1]


@pytest.mark.parametrize("owes", [True, False])
async def test_a_successor_that_does_not_heed_the_carry_is_not_believed(owes: bool) -> None:
    """A token drawn where the rule owes the law something would bias the text."""
    pair = Pair(3)

    def alter(reply: Any) -> None:
        if reply.HasField("verdict") and owes:
            reply.verdict.carry.CopyFrom(carry_of(reply.verdict.round))
        if reply.HasField("opened") and any(target.openings for target in pair.targets[1:]):
            if owes:
                reply.opened.token_id = 3
            else:
                reply.opened.ClearField("token_id")

    for target in pair.targets:
        target.alter = alter
    async with orchestrate(FakeDrafter(), *pair.targets) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Complete(request(speculation=GREEDY_BLOCK))
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert f"opened.token_id must be {'unset' if owes else 'set'}" in str(failed.value.details())


def levels_of(carry: Any) -> list[tuple[float, int]]:
    """Of a verdict's carry, which may be none."""
    return [(level.log_ratio, level.count) for level in carry.levels] if carry else []


async def test_a_real_successor_decides_as_the_lost_target_would(
    random_pair: tuple[Path, Path],
) -> None:
    """At each carry of some texts: the same verdict on the same draft, in the same round."""
    settings = TargetSettings(model=str(random_pair[1]), max_gamma=8)
    carries = 0
    async with AsyncExitStack() as stack:
        served = [await start(stack, make_target(settings)) for _ in range(2)]
        served.append(await start(stack, make_drafter(DrafterSettings(model=str(random_pair[0])))))
        for server in served:
            await server.ready()
        first, second = (TargetClient(address_of(server)) for server in served[:2])
        drafters = DrafterClient(address_of(served[2]))
        for client in (first, second, drafters):
            stack.push_async_callback(client.close)
        limit = 4 << 20
        for seed in range(8):
            tokens, most, round_ = [1, 2], 30, 0

            def prompt(at: int, seed: int = seed, tokens: list[int] = tokens) -> Prompt:
                left = 30 - (len(tokens) - 2)
                return Prompt("r", list(tokens), Sampling(seed=seed), at, left, 5)

            target = first.sequence(None, PATIENT, TextRecord(), limit, ANYBODY)
            drafter = drafters.sequence(None, PATIENT, TextRecord(), limit, limit, ANYBODY)
            await drafter.open(prompt(0))
            decided = await target.open(prompt(0), "greedy_block", DraftSize(4), None)
            assert decided is not None
            news = [decided.next_token]
            tokens += news
            while (left := most - (len(tokens) - 2)) > 0:
                drafted = await drafter.draft(
                    round_ + 1, len(tokens) - len(news), News(news), DraftSize(min(4, left)), True
                )
                carry, other = decided.carry, None
                if carry is not None:
                    carries += 1
                    successor = second.sequence(None, PATIENT, TextRecord(), limit, ANYBODY)
                    assert (
                        await successor.open(
                            prompt(round_ + 2), "greedy_block", DraftSize(4), carry
                        )
                        is None
                    )
                    other = await successor.verify(round_ + 3, len(tokens), drafted)
                    successor.cancel()
                round_ += 3
                decided = await target.verify(round_, len(tokens), drafted)
                if other is not None:
                    assert (other.num_accepted, other.next_token) == (
                        decided.num_accepted,
                        decided.next_token,
                    )
                    # Its prompt had other rows in a pass: the last bits of logits may differ.
                    ours, its = (levels_of(one.carry) for one in (decided, other))
                    assert [count for _, count in its] == [count for _, count in ours]
                    assert [ratio for ratio, _ in its] == pytest.approx(
                        [r for r, _ in ours], rel=1e-5
                    )
                news = [*drafted.token_ids[: decided.num_accepted], decided.next_token]
                tokens += news
            target.cancel()
            drafter.cancel()
    assert carries > 30
