"""Prefixes that drafters and targets share among texts, as their callers see them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2, prefix_cache_pb2, prefix_cache_pb2_grpc
from tandem.drafter.v1 import drafter_pb2_grpc
from tandem.target.v1 import target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.waiting import until
from tests.support.wire.scrape import ANY_PORT, Scraped, families
from tests.support.wire.steps import (
    INVALID,
    draft_step,
    open_draft,
    open_verify,
    status_of,
    verify_step,
)
from tests.support.wire.talk import Talk

PROMPT = [1, 2, 3, 4] * 10
# Whole blocks of 16, without the last token.
FOUND = 32


@dataclass
class Service:
    """A drafter or a target."""

    opening: Callable[..., Any]
    step: Callable[..., Any]
    call: Callable[[], Any]
    port: int
    admin: prefix_cache_pb2_grpc.PrefixCacheServiceAsyncStub

    async def opened(self, prompt: list[int] = PROMPT, *steps: Any, **fields: Any) -> Any:
        """The answer to a text that opens, and after some steps closes."""
        talk = Talk(self.call())
        answer = await talk.ask(self.opening(token_ids=prompt, **fields))
        for step in steps:
            await talk.ask(step)
        await talk.call.done_writing()
        await talk.end()
        return answer.opened

    async def scrape(self) -> Scraped:
        return Scraped(await families(self.port))

    async def is_idle(self) -> bool:
        """Whether the room of all texts is given back, which is not waited for."""
        return not (await self.scrape()).value("tandem_kv_positions", state="used")


@asynccontextmanager
async def serving(role: str, model: Path, **keys: Any) -> AsyncIterator[Service]:
    settings: dict[str, Any] = {"model": str(model), "engine": "torch", "metrics_listen": ANY_PORT}
    settings |= {"cache_tokens": 1024, "max_length": 512, **keys}
    async with AsyncExitStack() as stack:
        if role == "drafter":
            service = make_drafter(DrafterSettings(**settings))
        else:
            service = make_target(TargetSettings(**settings))
        server = await start(stack, service, "127.0.0.1:0")
        await server.ready()
        operator = await connect(stack, f"127.0.0.1:{server.admin_port}")
        admin: Any = prefix_cache_pb2_grpc.PrefixCacheServiceStub(operator)
        channel = await connect(stack, address_of(server))
        assert service.metering is not None
        if role == "drafter":
            call = drafter_pb2_grpc.DrafterServiceStub(channel).Draft
            yield Service(open_draft, draft_step, call, service.metering.port, admin)
        else:
            verify = target_pb2_grpc.TargetServiceStub(channel).Verify
            yield Service(open_verify, verify_step, verify, service.metering.port, admin)


@pytest.fixture(params=["drafter", "target"])
async def service(
    request: pytest.FixtureRequest, random_pair: tuple[Path, Path]
) -> AsyncIterator[Service]:
    async with serving(request.param, random_pair[request.param == "target"]) as found:
        yield found


async def test_a_prompt_is_found_by_texts_of_the_same_salt(service: Service) -> None:
    first, again = await service.opened(), await service.opened()
    assert (first.cached_tokens, again.cached_tokens) == (0, FOUND)
    salted: dict[str, Any] = {"cache_salt": "s" * 128}
    assert (await service.opened(**salted)).cached_tokens == 0
    assert (await service.opened(**salted)).cached_tokens == FOUND
    assert (await service.opened([*PROMPT[:20], 0, *PROMPT])).cached_tokens == 16
    scraped = await service.scrape()
    assert scraped.value("tandem_prefix_cache_queries_total") == 4 * len(PROMPT) + 61
    assert scraped.value("tandem_prefix_cache_hits_total") == 2 * FOUND + 16


async def test_what_is_kept_is_free(service: Service) -> None:
    await service.opened()
    await until(service.is_idle)
    scraped = await service.scrape()
    states = [scraped.value("tandem_kv_positions", state=one) for one in ("used", "kept", "free")]
    assert states == [0, FOUND, 1024 - FOUND]
    fills = await service.opened([0] * 400, max_new_tokens=100)
    assert fills.cached_tokens == 0


async def test_an_administrator_empties_it(service: Service) -> None:
    asked = prefix_cache_pb2.ForgetPrefixesRequest()
    assert (await service.admin.ForgetPrefixes(asked)).positions == 0
    await service.opened()
    await until(service.is_idle)
    assert (await service.admin.ForgetPrefixes(asked)).positions == FOUND
    first, again = await service.opened(), await service.opened()
    assert (first.cached_tokens, again.cached_tokens) == (0, FOUND)


async def test_a_salt_that_is_too_long_is_refused(service: Service) -> None:
    code, sentence = await status_of(Talk(service.call()), service.opening(cache_salt="s" * 129))
    assert (code, sentence) == (INVALID, "open.cache_salt must be at most 128 characters")


async def test_the_next_turn_finds_the_answer(service: Service) -> None:
    """Also where it was drafted: what was emitted, and nothing else."""
    if service.opening is open_draft:
        steps = [
            service.step(round=1, position=40, new_token_ids=[4, 0, 1, 2] * 3),
            service.step(round=2, position=52, new_token_ids=[3]),
        ]
        turn = [*PROMPT, *[4, 0, 1, 2] * 3, 3]
    else:
        draft, position, turn, steps = common_pb2.Draft(token_ids=[0, 1]), 41, list(PROMPT), []
        talk = Talk(service.call())
        opened = await talk.ask(service.opening(token_ids=PROMPT, max_new_tokens=30))
        turn.append(opened.opened.token_id)
        for round_ in range(1, 12):
            step = service.step(round=round_, position=position, draft=draft)
            verdict = (await talk.ask(step)).verdict
            turn += [*draft.token_ids[: verdict.num_accepted], verdict.next_token_id]
            position = verdict.position
        await talk.call.done_writing()
        await talk.end()
        assert len(turn) == position
    await service.opened(PROMPT, *steps)
    found = (await service.opened([*turn, 1, 2])).cached_tokens
    assert found == (len(turn) - 1) // 16 * 16 > FOUND


async def test_a_prompt_whose_log_probabilities_are_wanted_is_computed(
    random_pair: tuple[Path, Path],
) -> None:
    wanted = common_pb2.LogProbsSpec(prompt=True)
    async with serving("target", random_pair[1]) as service:
        for found in (0, 0):
            answer = await service.opened(log_probs=wanted)
            assert answer.cached_tokens == found
            assert len(answer.prompt_log_probs.values) == len(PROMPT) - 1
        assert (await service.opened()).cached_tokens == FOUND


@pytest.mark.parametrize("role", ["drafter", "target"])
async def test_a_service_may_share_nothing(role: str, random_pair: tuple[Path, Path]) -> None:
    async with serving(role, random_pair[role == "target"], prefix_cache=False) as service:
        for _ in range(2):
            assert (await service.opened()).cached_tokens == 0
