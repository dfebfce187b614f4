"""Chats over several replicas that keep what they computed: each stays where it is warm."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from tests.support.waiting import until
from tests.support.wire.fake_carrier import Fake
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request
from tests.support.wire.fleet import Fleet, fleet, held

__all__ = ["fleet"]

CHATS, TURNS, ANSWER = 24, 6, 16
BLOCK = 16  # not the orchestrator's
SYSTEM = [random.Random(0).randrange(1, 100) for _ in range(256)]


class Warm(Fake):
    """Full blocks of a fake's texts, which are found by later ones of an equal salt.

    Attributes:
        found: tokens that were found computed.
        salts: that texts came with.
    """

    def __init__(self, number: int = 1) -> None:
        super().__init__(incarnation=number, max_sequences=64, max_length=4096)
        self.found = 0
        self.salts: list[str] = []
        self._computed: set[int] = set()
        self._salt_of: dict[int, str] = {}

    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        reply = super().answer_to(request, tokens)  # type: ignore[safe-super]
        if not request.HasField("open"):
            self._computed.update(self._blocks(tokens, self._salt_of[id(tokens)]))
            return reply
        opened, salt = request.open, request.open.cache_salt
        blocks = self._blocks(opened.token_ids, salt)
        cached = BLOCK * sum(block in self._computed for block in blocks)
        self._salt_of[id(tokens)] = salt
        if opened.request_id != "trial":
            self.found += cached
            self.salts.append(salt)
            self._computed.update(blocks)
        reply.opened.cached_tokens = cached
        reply.opened.incarnation = self.info.incarnation
        return reply

    @staticmethod
    def _blocks(tokens: Any, salt: str) -> list[int]:
        """A number for each full block with all before it."""
        parent, found = hash(salt), []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            parent = hash((parent, tuple(tokens[end - BLOCK : end])))
            found.append(parent)
        return found


class WarmTarget(Warm, FakeTarget):
    """A target that keeps what it computed."""


class WarmDrafter(Warm, FakeDrafter):
    """A drafter that keeps what it computed."""


def plain(**changes: Any) -> Any:
    """A request without drafts."""
    return request(**({"speculation": {"gamma": 0}} | changes))


async def chat(stub: Any, number: int, **changes: Any) -> list[Any]:
    """A chat's turns, one after the other; returns their summaries."""
    numbers, tokens, summaries = random.Random(number + 1), list(SYSTEM), []
    stopping = {"max_new_tokens": ANSWER}
    for _ in range(TURNS):
        tokens += [numbers.randrange(1, 100) for _ in range(24)]
        reply = await stub.Complete(plain(prompt_token_ids=tokens, stopping=stopping, **changes))
        assert list(reply.token_ids) == FakeTarget().text(ANSWER, tokens[-1])
        tokens += reply.token_ids
        summaries.append(reply.summary)
    return summaries


async def chats(stub: Any, **changes: Any) -> list[Any]:
    """All chats, at once."""
    each = await asyncio.gather(*(chat(stub, number, **changes) for number in range(CHATS)))
    return [summary for summaries in each for summary in summaries]


async def test_chats_find_what_they_find_with_one_replica(fleet: Fleet) -> None:
    alone = WarmTarget()
    async with orchestrate(alone) as stub:
        await chats(stub)
    targets = WarmTarget(1), WarmTarget(2)
    await fleet.start(*targets)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    told = await chats(fleet.stub)
    assert sum(summary.cached_tokens for summary in told) == sum(each.found for each in targets)
    assert sum(target.found for target in targets) >= 0.9 * alone.found
    assert max(target.opened for target in targets) <= 1.3 * CHATS * TURNS / 2


@pytest.mark.parametrize(("route", "opened"), [(True, [0, TURNS]), (False, [TURNS // 2] * 2)])
async def test_a_chat_stays_where_it_was(route: bool, opened: list[int]) -> None:
    targets = WarmTarget(1), WarmTarget(2)
    async with orchestrate(*targets, route_by_prefix=route) as stub:
        told = await chat(stub, 0)
    assert sorted(target.opened for target in targets) == opened
    rest = [summary.prompt_tokens - summary.cached_tokens for summary in told[1:]]
    assert (max(rest) < 24 + 2 * BLOCK) == route


async def test_the_answer_is_remembered_with_the_prompt(fleet: Fleet) -> None:
    """Both replicas know the prompt, and one of them the answer that the next turn begins with."""
    targets = WarmTarget(1), WarmTarget(2)
    await fleet.start(*targets)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    prompt, texts = SYSTEM[:64], []
    async with held(*targets) as go_on:
        for length in (4, 4, 80):  # two to the first, and then one to the other
            stopping = {"max_new_tokens": length}
            texts.append(
                asyncio.ensure_future(fleet.text(prompt_token_ids=prompt, stopping=stopping))
            )
            await until(lambda: sum(target.opened for target in targets) == len(texts))
        (answering,) = (target for target in targets if target.opened == 1)
        go_on.set()
        *_, answer = [await text for text in texts]
    following = [*prompt, *answer.token_ids, *SYSTEM[:16]]
    told = await fleet.text(prompt_token_ids=following)
    assert answering.opened == 2
    assert told.summary.cached_tokens > len(prompt)


async def test_a_replica_that_dies_costs_prefixes_and_no_text(fleet: Fleet) -> None:
    targets = WarmTarget(1), WarmTarget(2)
    _, second = await fleet.start(*targets)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    texts = asyncio.ensure_future(chats(fleet.stub))
    await until(lambda: sum(target.opened for target in targets) > CHATS * TURNS / 2)
    await fleet.kill(second)
    assert len(await texts) == CHATS * TURNS


async def test_drafters_keep_chats_too() -> None:
    drafters = WarmDrafter(1), WarmDrafter(2)
    async with orchestrate(*drafters, WarmTarget()) as stub:
        told = await chats(stub, speculation={"gamma": 4})
    assert sum(each.drafter_cached_tokens for each in told) == sum(each.found for each in drafters)
    alone = sum(each.cached_tokens for each in told)  # by the target
    assert sum(each.drafter_cached_tokens for each in told) >= 0.9 * alone
    assert max(drafter.opened for drafter in drafters) <= 1.3 * CHATS * TURNS / 2


@pytest.mark.parametrize("key", ["", "one"])
async def test_texts_of_one_key_go_to_one_replica(key: str) -> None:
    targets = WarmTarget(1), WarmTarget(2)
    async with orchestrate(*targets) as stub:
        for number in range(8):  # texts that have nothing in common
            ids = [random.Random(number).randrange(1, 100) for _ in range(64)]
            await stub.Complete(plain(prompt_token_ids=ids, prompt_cache_key=key))
    assert (0 in [target.opened for target in targets]) == bool(key)


async def test_a_prefix_is_of_a_caller_and_a_salt() -> None:
    target, drafter = WarmTarget(), WarmDrafter()
    settings: dict[str, Any] = {"client_header": "x-client"}

    async def ask(stub: Any, name: str, salt: str, drafted: bool = True) -> int:
        gamma = {"gamma": 4 if drafted else 0}
        text = request(prompt_token_ids=SYSTEM, cache_salt=salt, speculation=gamma)
        reply = await stub.Complete(text, metadata=(("x-client", name),) if name else ())
        return int(reply.summary.cached_tokens)

    scopes = [(name, salt) for name in ("", "ann", "annb") for salt in ("", "b", "x")]
    async with orchestrate(drafter, target, **settings) as stub:
        for scope in scopes:
            assert await ask(stub, *scope) == 0, scope
        for scope in scopes:
            assert await ask(stub, *scope) == len(SYSTEM), scope
    assert target.salts == drafter.salts
    assert target.salts[0] == ""
    assert len(set(target.salts)) == len(scopes)
    assert not any(name in told for told in target.salts for name in ("ann", "x"))
    target.salts.clear()
    async with orchestrate(target, **settings, cache_scope="all") as stub:
        for scope in scopes:
            await ask(stub, *scope, drafted=False)
    assert len(set(target.salts)) == 3


async def test_a_count_that_cannot_be_is_refused() -> None:
    target = WarmTarget()

    def lie(reply: Any) -> None:
        if reply.HasField("opened"):
            reply.opened.cached_tokens = 4

    target.alter = lie
    async with orchestrate(target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(plain(prompt_token_ids=[1, 2, 3]))
        assert refused.value.code() == grpc.StatusCode.INTERNAL
        await stub.Complete(plain(prompt_token_ids=[1, 2, 3, 4]))
