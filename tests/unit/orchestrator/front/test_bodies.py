"""What bodies of HTTP calls become, and what is refused of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from orchestrator.front.http.bodies.chat import ChatBody
from orchestrator.front.http.bodies.completion import CompletionBody
from orchestrator.front.http.bodies.fields import Body
from orchestrator.front.http.bodies.reading import read
from orchestrator.front.http.bodies.tokens import DetokenizeBody, TokenizeBody
from orchestrator.front.http.errors import body_of
from tandem.errors import InvalidRequest
from tandem.speculation.request.sampling import MAX_SEED
from tests.support.repository import ROOT

HTTP_PAGE = (ROOT / "docs" / "http.md").read_text()


def completion(**fields: Any) -> CompletionBody:
    return read(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


def seeds(count: int = 1, **fields: Any) -> list[int]:
    body = completion(**fields)
    return [body.request("x", choice, "id").sampling.seed for choice in range(count)]


@pytest.mark.parametrize("fields", [{}, {"seed": None}, {"seed": -1}])
def test_a_seed_is_drawn_for_each_text_that_names_none(fields: dict[str, Any]) -> None:
    assert len({*seeds(3, **fields), *seeds(3, **fields)}) == 6


def test_texts_of_a_call_have_the_seeds_that_follow() -> None:
    assert seeds(2, seed=5) == [5, 6]
    assert seeds(3, seed=MAX_SEED - 1) == [MAX_SEED - 1, MAX_SEED, 0]


@pytest.mark.parametrize("seed", [-2, MAX_SEED + 1, MAX_SEED + 6, 5 - 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^seed: "):
        completion(seed=seed)


def test_a_completion_has_openais_default_where_it_names_no_limit() -> None:
    for fields, named in (({}, None), ({"max_tokens": None}, None), ({"max_tokens": 9}, 9)):
        asked = completion(**fields).request("x", 0, "id")
        assert (asked.max_new_tokens, asked.default_new_tokens) == (named, 16)


def test_null_is_as_absent_inside_objects_too() -> None:
    nothing: dict[str, Any] = {
        "seed": 1,
        "tandem": {"tokens": None, "gamma": None, "verifier_options": None},
    }
    nothing["stream_options"] = {"include_usage": None}
    assert completion(**nothing).request("x", 0, "id") == completion(seed=1).request("x", 0, "id")


def test_a_name_that_is_not_known_is_refused_with_null_too() -> None:
    with pytest.raises(InvalidRequest, match=r"^tandem.typo: "):
        completion(tandem={"typo": None})


SENTENCES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "max_new_tokens: 9 prompt tokens; gamma 0 needs none", "max_tokens"),
    ({}, "sampling.shaping.min_tokens must be at most max_new_tokens, 4", "min_tokens"),
    ({}, "stop_strings may hold 16 strings", "stop"),
    ({}, "prompt_token_ids: a sequence may hold 9 tokens, got 10", "prompt"),
    ({}, "gamma must be 0..8, got 9", "tandem.gamma"),
    ({}, "verifier_options: no 'x', block has none", "tandem.verifier_options"),
    ({"guided_regex": "gamma("}, "sampling.shaping.grammar: gamma( is open", "guided_regex"),
    ({"guided_json": {}}, "grammar may have 9 characters", "guided_json"),
    ({"guided_grammar": "a"}, "sampling.shaping.grammar: wrong", "guided_grammar"),
    (
        {"structured_outputs": {"choice": ["a"]}},
        "sampling.shaping.grammar: wrong",
        "structured_outputs.choice",
    ),
    (
        {"response_format": {"type": "json_object"}},
        "sampling.shaping.grammar: wrong",
        "response_format",
    ),
]


@pytest.mark.parametrize(("fields", "sentence", "field"), SENTENCES)
def test_a_sentence_names_the_callers_own_fields(
    fields: dict[str, Any], sentence: str, field: str
) -> None:
    error = body_of(completion(**fields).named(InvalidRequest(sentence)))["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert not re.search(r"new_tokens|strings:|sampling|tandem\.tandem", error["message"])
    if "guided_regex" in fields:
        assert error["message"] == "guided_regex: gamma( is open", "the client's text stays"


def test_a_chat_has_names_of_its_own() -> None:
    sentences = ("max_new_tokens: 9", "prompt: 9 characters", "chat: the template says: no")
    for fields, limit in (
        ({}, "max_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ):
        message = {"role": "user", "content": "hi"}
        body = read(ChatBody, json.dumps({"messages": [message], **fields}).encode())
        told = [body_of(body.named(InvalidRequest(each)))["error"] for each in sentences]
        assert [each["param"] for each in told] == [limit, "messages", "messages"]
        assert [each["message"].partition(":")[0] for each in told] == [limit, *["messages"] * 2]


def test_two_grammars_are_both_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_regex: it and structured_outputs\.regex"):
        completion(guided_regex="a", structured_outputs={"regex": "b"}).request("x", 0, "id")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temprature": 1.5}, "temprature: there is no such field here; did you mean temperature?"),
        ({"qqqq": 1}, "qqqq: there is no such field here; leave it out"),
        ({"max_new_tokens": 3}, "max_new_tokens: .* did you mean max_tokens?"),
        ({"max_completion_tokens": 3}, "max_completion_tokens: .* did you mean max_tokens?"),
        ({"repeat_penalty": 5.0}, "repeat_penalty: .* did you mean repetition_penalty?"),
        ({"regex": "yes"}, "regex: .* did you mean guided_regex?"),
        ({"grammar": "x"}, "grammar: .* did you mean guided_grammar?"),
        ({"json_schema": {}}, "json_schema: .* did you mean guided_json?"),
        *(
            ({name: value}, f"{name} is not supported here")
            for name, value in (
                ("thinking_token_budget", 5),
                ("logits_processors", ["x"]),
                ("prompt_embeds", "AAAA"),
                ("typical_p", 0.2),
                ("no_repeat_ngram_size", 2),
                ("priority", 1),
                ("add_special_tokens", False),
            )
        ),
    ],
)
def test_a_field_without_an_effect_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{sentence}") as refused:
        completion(**fields)
    assert body_of(refused.value)["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody])
def test_each_body_refuses_unknown_fields(kind: type[Body]) -> None:
    own: dict[str, Any] = {
        "prompt": "x",
        "messages": [{"role": "user", "content": "x", "a field of the template": 1}],
        "tokens": [1],
    }
    body = {name: value for name, value in own.items() if name in kind.model_fields}
    read(kind, json.dumps(body).encode())
    unknown = json.dumps({**body, "modle": "x"}).encode()
    with pytest.raises(InvalidRequest, match=r"^modle: .* did you mean model?"):
        read(kind, unknown)
    read(kind, unknown, unknown=True)


def test_what_the_page_lists_is_without_an_effect() -> None:
    (line,) = re.findall(r"Known, and without an effect: (.*?)\.\n", HTTP_PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == CompletionBody.ignored == ChatBody.ignored
    completion(**dict.fromkeys(CompletionBody.ignored, "x"))
    named = re.findall(r"such as (`suffix`.*?), and a `tool_choice`", HTTP_PAGE, re.DOTALL)[0]
    assert set(re.findall(r"`(\w+)`", named)) <= {*CompletionBody.unsupported}


def test_values_that_ask_for_nothing_are_taken() -> None:
    for kind, own in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [{"role": "u"}]})):
        nothing = {name: values[-1] for name, values in kind.unsupported.items()}
        read(kind, json.dumps({**own, **nothing}).encode())


def test_other_names_are_none_of_ours() -> None:
    for kind in (CompletionBody, ChatBody):
        assert not kind.model_fields.keys() & (kind.unsupported.keys() | kind.ignored)
        known = {name.partition(".")[0] for name in kind.renamed.values()}
        assert known <= kind.model_fields.keys()


def test_a_salt_and_a_key_of_the_cache_reach_the_request() -> None:
    asked = completion(cache_salt="s", prompt_cache_key="k").request("x", 0, "id")
    assert (asked.cache_salt, asked.cache_key) == ("s", "k")
    for nothing in ({}, {"cache_salt": None, "prompt_cache_key": ""}):
        asked = completion(**nothing).request("x", 0, "id")
        assert (asked.cache_salt, asked.cache_key) == ("", "")


@pytest.mark.parametrize("value", ["", 1, ["x"], "x" * 129])
def test_another_salt_than_a_text_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^cache_salt: "):
        completion(cache_salt=value)


@pytest.mark.parametrize("own", [{}, {"learn": None}, {"learn": True}])
def test_a_text_may_be_kept_unless_it_says_no(own: dict[str, Any]) -> None:
    assert completion(tandem=own).request("x", 0, "id").learn


def test_a_text_that_may_not_be_kept() -> None:
    asked = read(ChatBody, b'{"messages": [{"role": "u"}], "tandem": {"learn": false}}')
    assert not asked.request("x", 0, "id").learn
    with pytest.raises(InvalidRequest, match=r"^tandem.learn: "):
        completion(tandem={"learn": 0})
    with pytest.raises(InvalidRequest, match=r"^learn: .* did you mean tandem.learn\?"):
        completion(learn=False)
