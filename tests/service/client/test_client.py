"""`tandem.Client` and `tandem.AsyncClient`: results, options, errors, cancellation, resumption."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import tandem
from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, start
from tests.support.processes.ports import free_port
from tests.support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def main("


class Served:
    """An orchestrator over the embedded pair, and more of them on demand.

    Attributes:
        address: of the first.
        servers: all of them.
    """

    def __init__(self, stack: AsyncExitStack, **peers: Any) -> None:
        self._stack, self._peers = stack, peers
        self.address = ""
        self.servers: list[Any] = []

    async def add(self, **settings: Any) -> str:
        given = OrchestratorSettings(gamma=4, **self._peers, **settings)
        server = await start(self._stack, make_orchestrator(given))
        await server.ready()
        self.servers.append(server)
        self.address = self.address or address_of(server)
        return address_of(server)

    async def idle(self) -> bool:
        async with tandem.AsyncClient(self.address) as client:
            return not (await client.info()).active_requests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peers(embedded_pair: tuple[Path, Path]) -> AsyncIterator[dict[str, tuple[str, ...]]]:
    """A drafter and a target, for the orchestrators of all tests."""
    small, large = map(str, embedded_pair)
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(model=small, max_sequences=8)))
        target = await start(stack, make_target(TargetSettings(model=large, max_sequences=8)))
        yield {"drafters": (address_of(drafter),), "targets": (address_of(target),)}


@pytest_asyncio.fixture(loop_scope="module")
async def served(peers: dict[str, tuple[str, ...]]) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        found = Served(stack, **peers)
        await found.add()
        yield found


async def test_both_clients_give_the_same_text(served: Served) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 24, "seed": 7, "gamma": 4, "log_probs": 2}

    def blocking() -> tuple[tandem.GeneratedText, list[tandem.GeneratedRound], Any]:
        with tandem.Client(served.address) as client:
            whole = client.generate(PROMPT, **asked)
            stream = client.stream(PROMPT, **asked)
            return whole, list(stream), stream.result

    whole, rounds, result = await asyncio.to_thread(blocking)
    async with tandem.AsyncClient(served.address) as client:
        stream = client.stream(PROMPT, **asked)
        found = [round_ async for round_ in stream]
        again = await client.generate(PROMPT, **asked)
    assert str(whole) == whole.text == "".join(round_.text for round_ in rounds)
    assert found == rounds == list(whole.rounds)
    assert stream.result.token_ids == again.token_ids == result.token_ids
    assert len(whole.tokens) == 24
    assert whole.finish_reason == "length"
    assert whole.seed == 7
    assert whole.acceptance_rate == whole.summary.acceptance_rate > 0
    assert {token.origin for token in whole.tokens} >= {"accepted", "bonus"}
    assert sum(round_.accepted for round_ in rounds) == whole.summary.accepted_tokens
    for token in whole.tokens:
        assert token.log_prob is not None
        assert token.log_prob <= 0
        assert len(token.top) == 2


async def test_every_option_reaches_the_request(served: Served) -> None:
    async with tandem.AsyncClient(served.address) as client:
        text = await client.generate(
            PROMPT,
            max_new_tokens=12,
            temperature=0.7,
            top_k=30,
            top_p=0.9,
            min_p=0.01,
            seed=3,
            stop="zzz",
            stop_token_ids=[5],
            ignore_eos=True,
            gamma=2,
            verifier="token",
            logit_bias={40: 1.5},
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            min_tokens=4,
            bad_words=["self", [7, 8]],
            regex="(.|\\n)*",
            prompt_log_probs=True,
            request_id="mine",
        )
    effective = text.summary.effective
    shaping = effective.sampling.shaping
    assert text.summary.request_id == "mine"
    assert (effective.sampling.top_k, effective.sampling.seed) == (30, 3)
    assert (effective.speculation.gamma, effective.speculation.verifier) == (2, "token")
    assert list(effective.stopping.stop_strings) == ["zzz"]
    assert effective.stopping.ignore_eos
    assert (shaping.repetition_penalty, shaping.min_tokens) == (1.5, 4)
    assert shaping.logit_bias == {40: 1.5}
    assert shaping.regex == "(.|\\n)*"
    assert [7, 8] in [list(word.token_ids) for word in shaping.bad_words]
    assert [one.id for one in text.prompt]
    assert text.prompt[0].log_prob is None
    assert text.prompt[1].log_prob is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "sampling.temperature must be finite"),
    ({"what": 1}, "what: there is no such option"),
    ({"top_k": -1}, "top_k: -1 has the wrong type or is out of range"),
    ({"stop": 7}, "stop: 7 has the wrong type or is out of range"),
    ({"prompt": [{"role": "user", "content": "Hi"}, 5]}, "a chat is a list of messages"),
    ({"regex": "a", "grammar": "start: /a/"}, "regex: it and grammar exclude each other"),
    ({"choice": ["a"], "grammar": "start: /a/"}, "grammar: it and choice exclude each other"),
    ({"json_schema": {"type": "no"}}, "sampling.shaping.grammar: .*Invalid type"),
]


async def test_what_cannot_be_is_refused(served: Served) -> None:
    async with tandem.AsyncClient(served.address) as client:
        for options, sentence in REFUSED:
            with pytest.raises(tandem.Refused, match=sentence) as refused:
                await client.generate(**{"prompt": PROMPT, **options})
            assert refused.value.status == "INVALID_ARGUMENT"
            assert isinstance(refused.value, tandem.CallFailed)


async def test_choices_and_schemas_are_kept_to(served: Served) -> None:
    async with tandem.AsyncClient(served.address) as client:
        text = await client.generate(PROMPT, choice=["one", "two"], max_new_tokens=9)
        assert str(await client.generate(PROMPT, choice="one", max_new_tokens=9)) == "one"
        words = (await client.generate(PROMPT, bad_words="self", max_new_tokens=1)).summary
        assert len(words.effective.sampling.shaping.bad_words) == 2, "as it is, and after a space"
        number = await client.generate(PROMPT, json_schema='{"enum": [1, 2]}', max_new_tokens=9)
    assert str(text) in ("one", "two")
    assert number.text.strip() in ("1", "2")


async def test_a_text_that_is_left_frees_its_places(served: Served) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 400, "gamma": 1}

    def leave() -> None:
        with tandem.Client(served.address) as client, client.stream(PROMPT, **asked) as stream:
            next(iter(stream))
            with pytest.raises(RuntimeError, match="has not ended"):
                _ = stream.result

    await asyncio.to_thread(leave)
    await until(served.idle)
    async with tandem.AsyncClient(served.address) as client:
        async with client.stream(PROMPT, **asked) as stream:
            async for _ in stream:
                break
        await until(served.idle)


async def test_a_client_that_closes_ends_its_texts(served: Served) -> None:
    client = tandem.Client(served.address)
    began = threading.Event()

    def read() -> None:
        for _ in client.stream(PROMPT, max_new_tokens=400, gamma=1):
            began.set()

    reading = asyncio.create_task(asyncio.to_thread(read))
    await asyncio.to_thread(began.wait)
    client.close()
    with pytest.raises(tandem.Lost):
        await reading
    await until(served.idle)
    with pytest.raises(tandem.Lost, match="the client is closed"):
        await asyncio.to_thread(client.info)


async def test_nobody_there_is_said(served: Served) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    async with tandem.AsyncClient(nowhere) as client:
        with pytest.raises(tandem.Lost, match=f"no orchestrator answers at {nowhere}"):
            await client.generate(PROMPT)
    with tandem.Client(nowhere) as blocking, pytest.raises(tandem.Lost, match="no orchestrator"):
        await asyncio.to_thread(blocking.info)
    # The next address is tried.
    async with tandem.AsyncClient(nowhere, served.address) as client:
        assert len((await client.generate(PROMPT, max_new_tokens=3)).tokens) == 3


async def test_time_is_bounded(served: Served) -> None:
    async with tandem.AsyncClient(served.address) as client:
        with pytest.raises(tandem.TimedOut):
            await client.generate(PROMPT, max_new_tokens=400, timeout_s=0.05)
    # Not even time to connect.
    async with tandem.AsyncClient(served.address) as client:
        with pytest.raises(tandem.TimedOut):
            await client.generate(PROMPT, timeout_s=0.0)
    with tandem.Client(served.address) as blocking, pytest.raises(tandem.TimedOut):
        await asyncio.to_thread(blocking.generate, PROMPT, timeout_s=0.0)


async def test_a_full_service_says_when_to_try_again(served: Served) -> None:
    address = await served.add(max_requests=1)
    async with (
        tandem.AsyncClient(address) as client,
        client.stream(PROMPT, max_new_tokens=400, gamma=1) as stream,
    ):
        async for _ in stream:
            break
        with pytest.raises(tandem.Overloaded) as full:
            await client.generate(PROMPT)
    assert full.value.retry_seconds is not None
    assert full.value.retry_seconds > 0


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_text_goes_on_at_another_orchestrator(served: Served, blocking: bool) -> None:
    other = await served.add()
    notes: list[str] = []
    asked: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0.0, "gamma": 1}
    async with tandem.AsyncClient(other) as client:
        whole = await client.generate(PROMPT, **asked)
    loop, stop = asyncio.get_running_loop(), served.servers[0].stop

    def lose() -> None:
        asyncio.run_coroutine_threadsafe(stop(0.0), loop).result(HANG_SECONDS)

    def read() -> tandem.GeneratedText:
        with (
            tandem.Client(served.address, other, note=notes.append) as client,
            client.stream(PROMPT, **asked) as stream,
        ):
            for round_ in stream:
                if round_.number == 3:
                    lose()
        return stream.result

    if blocking:
        text = await asyncio.to_thread(read)
    else:
        async with tandem.AsyncClient(served.address, other, note=notes.append) as client:
            async with client.stream(PROMPT, **asked) as stream:
                async for round_ in stream:
                    if round_.number == 3:
                        await stop(0.0)
            text = stream.result
    assert text.token_ids == whole.token_ids
    assert text.summary.new_tokens == 120
    assert len(notes) == 1
    assert "broke off" in notes[0]


async def test_a_connection_that_broke_between_two_calls_is_made_anew(served: Served) -> None:
    other = await served.add()
    async with tandem.AsyncClient(served.address, other) as client:
        await client.generate(PROMPT, max_new_tokens=2)
        await served.servers[0].stop(0.0)
        assert len((await client.generate(PROMPT, max_new_tokens=2)).tokens) == 2
