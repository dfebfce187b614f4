"""/v1/completions as OpenAI's own client calls it, beside the same texts by gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.service.http.conftest import IN_ONE_LOOP, Fronts, ServedPair, fronting
from tests.support.processes.services import generation
from tests.support.waiting import until

pytestmark = IN_ONE_LOOP

PROMPT = "def main("


async def by_grpc(fronts: Fronts, **changes: Any) -> pb.CompleteResponse:
    message = generation(PROMPT, **changes)
    reply: pb.CompleteResponse = await fronts.services.orchestrator.Complete(
        pb.CompleteRequest(generation=message)
    )
    return reply


async def test_a_text_is_that_of_grpc(fronts: Fronts) -> None:
    for temperature in (0.0, 1.0):
        wanted = await by_grpc(fronts, max_new_tokens=24, temperature=temperature, seed=7, gamma=4)
        found = await fronts.openai.completions.create(
            model="target", prompt=PROMPT, max_tokens=24, temperature=temperature, seed=7
        )
        assert found.choices[0].text == wanted.text
        assert found.choices[0].finish_reason == "length"
        assert found.object == "text_completion"
        assert found.usage is not None
        assert found.usage.completion_tokens == len(wanted.token_ids)
        assert found.usage.prompt_tokens == wanted.summary.prompt_tokens
        assert found.usage.total_tokens == found.usage.prompt_tokens + 24
        own = found.usage.model_extra["tandem"]  # type: ignore[index]
        assert own["rounds"] == wanted.summary.rounds
        assert own["accepted_tokens"] == wanted.summary.accepted_tokens


async def test_the_blocking_client_has_the_same_text(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 12, "seed": 3}
    wanted = (await fronts.openai.completions.create(**asked)).choices[0].text

    def call() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=f"http://{fronts.address}/v1", api_key="none") as client:
            whole = client.completions.create(**asked).choices[0].text
            stream = client.completions.create(**asked, stream=True)
            parts = [choice.text for chunk in stream for choice in chunk.choices]
            return whole, "".join(parts), [model.id for model in client.models.list()]

    assert await asyncio.to_thread(call) == (wanted, wanted, ["target"])


async def test_a_stream_has_the_text_in_parts(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 24, "seed": 3}
    whole = await fronts.openai.completions.create(**asked)
    parts, usage = [], None
    stream = await fronts.openai.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage
        parts += chunk.choices
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert usage is not None
    assert usage == whole.usage
    # A round is a chunk, and the end is one of its own.
    assert len(parts) == usage.model_extra["tandem"]["rounds"] + 1


async def test_several_texts_have_numbers_of_their_own(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"model": "target", "max_tokens": 12, "seed": 5}
    found = await fronts.openai.completions.create(prompt=[PROMPT, "# "], n=2, **asked)
    texts = [choice.text for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    again = await fronts.openai.completions.create(prompt=PROMPT, **{**asked, "seed": 6})
    assert texts[1] == again.choices[0].text
    # Each prompt counts once.
    alone = await fronts.openai.completions.create(prompt=[PROMPT, "# "], **asked)
    assert found.usage is not None
    assert alone.usage is not None
    assert found.usage.prompt_tokens == alone.usage.prompt_tokens
    streamed: dict[int, str] = {}
    async for chunk in await fronts.openai.completions.create(
        prompt=[PROMPT, "# "], n=2, stream=True, **asked
    ):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[i] for i in range(4)] == texts


async def test_prompts_are_text_or_ids_and_may_be_echoed(fronts: Fronts) -> None:
    tokens = (await fronts.http.post("/tokenize", json={"prompt": PROMPT})).json()
    assert tokens["count"] == len(tokens["tokens"]) > 1
    back = (await fronts.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert back == {"prompt": PROMPT}
    asked: dict[str, Any] = {"model": "target", "max_tokens": 8, "seed": 1, "temperature": 0}
    plain = await fronts.openai.completions.create(prompt=PROMPT, **asked)
    ids = await fronts.openai.completions.create(prompt=tokens["tokens"], **asked)
    lists = await fronts.openai.completions.create(prompt=[tokens["tokens"]], **asked)
    assert plain.choices[0].text == ids.choices[0].text == lists.choices[0].text
    for echoed in (PROMPT, tokens["tokens"]):
        found = await fronts.openai.completions.create(prompt=echoed, echo=True, **asked)
        assert found.choices[0].text == PROMPT + plain.choices[0].text


async def test_stop_strings_end_a_text_before_or_behind_them(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 40, "seed": 2}
    whole = (await fronts.openai.completions.create(**asked)).choices[0].text
    stop = whole[10:13]
    end = whole.index(stop)
    found = await fronts.openai.completions.create(**asked, stop=[stop])
    assert found.choices[0].text == whole[:end]
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].model_extra == {"stop_reason": stop}
    for streams in (False, True):
        wanted = await fronts.http.post(
            "/v1/completions",
            json={**asked, "stop": stop, "include_stop_str_in_output": True, "stream": streams},
        )
        if not streams:
            assert wanted.json()["choices"][0]["text"] == whole[: end + len(stop)]
        else:
            assert wanted.text.endswith("data: [DONE]\n\n")
            assert stop in wanted.text


async def test_a_stop_token_is_told_by_its_id(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 12, "seed": 2}
    ids = (await by_grpc(fronts, max_new_tokens=12, seed=2, gamma=4)).token_ids
    more = {"stop_token_ids": [ids[5]]}
    found = await fronts.openai.completions.create(**asked, extra_body=more)
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].model_extra == {"stop_reason": ids[5]}
    assert found.usage is not None
    assert found.usage.completion_tokens == list(ids).index(ids[5]) + 1


async def test_tokens_tell_where_they_came_from(fronts: Fronts) -> None:
    own = {"tokens": True, "gamma": 3, "verifier": "token"}
    found = await fronts.openai.completions.create(
        model="target", prompt=PROMPT, max_tokens=16, seed=4, extra_body={"tandem": own}
    )
    told = found.choices[0].model_extra["tandem"]["tokens"]  # type: ignore[index]
    wanted = await by_grpc(fronts, max_new_tokens=16, seed=4, gamma=3, verifier="token")
    assert [token["id"] for token in told] == list(wanted.token_ids)
    assert {token["origin"] for token in told} <= {"accepted", "correction", "bonus"}
    assert "".join(token["text"] for token in told) == found.choices[0].text


async def test_models(fronts: Fronts) -> None:
    models = [model async for model in fronts.openai.models.list()]
    assert [model.id for model in models] == ["target"]
    model = await fronts.openai.models.retrieve("target")
    assert model.owned_by == "tandem"
    assert model.model_extra["tandem"]["drafter"] == "drafter"  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match="this one is: target"):
        await fronts.openai.models.retrieve("other")
    assert (await fronts.http.get("/health")).json() == {"status": "ready"}
    assert "version" in (await fronts.http.get("/version")).json()


async def test_the_target_has_the_names_that_it_is_given(served_pair: ServedPair) -> None:
    async with fronting(served_pair, model_names=("org/name", "other")) as fronts:
        models = [model async for model in fronts.openai.models.list()]
        assert [model.id for model in models] == ["org/name", "other"]
        assert (await fronts.openai.models.retrieve("org/name")).id == "org/name"
        for name in ("org/name", "other"):
            reply = await fronts.openai.completions.create(model=name, prompt="a", max_tokens=1)
            assert reply.model == "org/name"
        with pytest.raises(openai.NotFoundError, match="this one is: org/name"):
            await fronts.openai.completions.create(model="target", prompt="a", max_tokens=1)


async def test_a_client_that_leaves_leaves_nothing_open(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "n": 3}
    async with fronts.http.stream(
        "POST", "/v1/completions", json={**asked, "stream": True}
    ) as reply:
        async for _ in reply.aiter_bytes():
            break

    async def idle() -> bool:
        return await fronts.services.open_sequences() == 0

    await until(idle)
    whole = asyncio.ensure_future(fronts.http.post("/v1/completions", json=asked))
    await until(fronts.services.open_sequences)
    whole.cancel()
    await until(idle)
