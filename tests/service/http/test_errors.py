"""What a client is told of calls that cannot be answered: status, field and sentence."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest

from tests.service.http.conftest import IN_ONE_LOOP, Fronts, ServedPair, fronting
from tests.support.waiting import until

pytestmark = IN_ONE_LOOP

ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 4}


# Fields, and the field that the error names.
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**32}, "top_k"),
    ({"prompt": [{}] * 1000}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": "a\ud800"}, "body"),
    ({"prompt": None}, "prompt"),
    ({"tandem": {"verifer": "token"}}, "tandem.verifer"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"min_p": 2}, "min_p"),
    ({"seed": -2}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids"),
    ({"stop": [1]}, "stop"),
    ({"tandem": {"gamma": 99}}, "tandem.gamma"),
    ({"tandem": {"gamma": -1}}, "tandem.gamma"),
    ({"tandem": {"verifier": "none"}}, "tandem.verifier"),
    ({"tandem": {"max_nodes": 3}}, "tandem.max_nodes"),
    ({"best_of": 2}, "best_of"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"temprature": 0.5}, "temprature"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
]


async def test_a_field_that_is_out_of_range_is_named(fronts: Fronts) -> None:
    for fields, named in MALFORMED:
        for streams in (False, True):
            body = {**ASKED, **fields, "stream": streams}
            reply = await fronts.http.post("/v1/completions", content=json.dumps(body))
            assert reply.status_code == 400, (fields, reply.text)
            error = reply.json()["error"]
            assert error["param"] == named, (fields, error)
            assert error["message"].startswith(named), (fields, error)
            assert error["type"] == "invalid_request_error"
    assert await fronts.services.open_sequences() == 0


async def test_values_that_ask_for_nothing_are_taken(fronts: Fronts) -> None:
    nothing = {
        "presence_penalty": 0,
        "frequency_penalty": None,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "min_tokens": 0,
        "best_of": 1,
        "echo": None,
        "ignore_eos": None,
        "tandem": None,
        "response_format": {"type": "text"},
        "user": "ann",
        "top_k": -1,
        "seed": -1,
    }
    reply = await fronts.http.post("/v1/completions", json={**ASKED, **nothing})
    assert reply.status_code == 200, reply.text


async def test_unknown_fields_may_be_let_pass(served_pair: ServedPair) -> None:
    async with fronting(served_pair, unknown_fields="ignore") as fronts:
        plain = await fronts.http.post("/v1/completions", json={**ASKED, "temperature": 0})
        more = {**ASKED, "temperature": 0, "what_nobody_knows": 1}
        found = await fronts.http.post("/v1/completions", json=more)
        assert found.json()["choices"] == plain.json()["choices"]
        for body, status in (({"prompt": "x", "more": 1}, 200), ({"best_of": 2, **ASKED}, 400)):
            path = "/v1/completions" if "best_of" in body else "/tokenize"
            assert (await fronts.http.post(path, json=body)).status_code == status


NO_BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "body: no valid JSON"),
    (b"{", 400, "body: no valid JSON"),
    (b"[1]", 400, "body: it must be a JSON object"),
    (b"[" * 100_000, 400, "body: nested too deeply"),
    (b'{"prompt": "\xff"}', 400, "body: no valid JSON"),
    (b" " * (1 << 20) + b"{}", 413, "body: it has more than 1048576 bytes"),
]


async def test_a_body_that_is_none(served_pair: ServedPair) -> None:
    async with fronting(served_pair, max_message_mib=1) as fronts:
        for body, status, sentence in NO_BODIES:
            reply = await fronts.http.post("/v1/completions", content=body)
            assert reply.status_code == status, sentence
            assert reply.json()["error"]["message"] == sentence
            assert reply.json()["error"]["param"] == "body"


async def test_paths_methods_and_models(fronts: Fronts) -> None:
    lost = await fronts.http.get("/v2/completions")
    assert lost.status_code == 404
    assert "/v1/completions" in lost.json()["error"]["message"]
    wrong = await fronts.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == "/v1/completions is called with POST"
    assert wrong.headers["allow"] == "POST"
    host = {"host": fronts.address}
    absolute = httpx2.Request("GET", f"http://{fronts.address}/version", headers=host)
    absolute.extensions["target"] = f"http://{fronts.address}/version".encode()
    assert (await fronts.http.send(absolute)).status_code == 200
    with pytest.raises(openai.NotFoundError, match="this one is: target"):
        await fronts.openai.completions.create(model="gpt-5", prompt="x")


async def test_the_id_of_a_call_is_the_clients(fronts: Fronts) -> None:
    given = {"x-request-id": "mine"}
    reply = await fronts.http.post("/v1/completions", json=ASKED, headers=given)
    assert reply.headers["x-request-id"] == "mine"
    assert reply.json()["id"] == "cmpl-mine"
    refused = await fronts.http.post("/v1/completions", json={}, headers=given)
    assert refused.status_code == 400
    assert refused.headers["x-request-id"] == "mine"
    bad = await fronts.http.post("/v1/completions", json=ASKED, headers={"x-request-id": "a" * 129})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "x-request-id"


async def test_where_every_place_is_taken_a_client_learns_when_to_come_again(
    served_pair: ServedPair,
) -> None:
    async with fronting(served_pair, max_requests=1) as fronts:
        long = {**ASKED, "max_tokens": 1000, "ignore_eos": True}
        first = asyncio.ensure_future(fronts.http.post("/v1/completions", json=long))
        await until(fronts.services.open_sequences)
        reply = await fronts.http.post("/v1/completions", json=ASKED)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["type"] == "rate_limit_error"
        first.cancel()


async def test_before_there_is_a_pair_it_says_so() -> None:
    from contextlib import AsyncExitStack

    from orchestrator.front.service import make_service
    from orchestrator.settings import OrchestratorSettings
    from tests.service.conftest import start

    async with AsyncExitStack() as stack:
        settings = OrchestratorSettings(
            drafters=(), targets=("127.0.0.1:1",), http_listen="127.0.0.1:0", failover_seconds=0
        )
        service = make_service(settings)
        await start(stack, service)
        address = f"http://127.0.0.1:{service.fronts[0].port}"
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=address))
        for reply in (
            await http.get("/health"),
            await http.get("/v1/models"),
            await http.post("/v1/completions", json=ASKED),
        ):
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
        assert (await http.get("/version")).status_code == 200
