"""What a text is asked for with, as keyword arguments, and the request that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tandem.client.errors import Refused
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb

# Fields of common.proto by the names of options, where they differ.
_GRAMMARS = {"grammar": "lark"}
# Characters of a value in a sentence.
_MOST_SHOWN = 60

# A chat: messages with their `role` and `content`.
Messages = Sequence[Mapping[str, str]]
# Text, token ids, or a chat.
Prompt = str | Sequence[int] | Messages


class Options(TypedDict, total=False):
    """Of a text; those that are missing, or None, have the orchestrator's defaults. Their ranges
    are in `orchestrator.proto` and `common.proto`.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token.
        top_k: number of likeliest tokens to keep; 0 keeps all.
        top_p: keep the likeliest tokens up to this mass.
        min_p: drop tokens less likely than this share of the likeliest one.
        seed: with `gamma`, repeats a text.
        stop: texts before which it ends.
        stop_token_ids: tokens after which it ends.
        ignore_eos: go on past the model's end of text.
        gamma: tokens to draft a round; 0 decodes plainly.
        max_nodes: tokens to draft a round, where drafts are trees.
        verifier: the rule.
        verifier_options: of the rule, by their names.
        logit_bias: what is added to the logits of token ids.
        repetition_penalty: divides logits of tokens that came.
        frequency_penalty: subtracted for each time that a token was generated.
        presence_penalty: subtracted once for a token that was generated.
        min_tokens: fewest tokens before an end.
        bad_words: texts, or lists of token ids, that may not come.
        json_schema: that the text keeps to, as an object or as JSON.
        regex: that the text keeps to.
        choice: texts, one of which comes.
        grammar: in llguidance's variant of Lark.
        log_probs: of each token, and of this number of likeliest ones at its place.
        prompt_log_probs: those of the prompt too.
        processed_log_probs: of the distribution that tokens are drawn from.
        request_id: for logs and traces.
        cache_salt: computed prefixes are shared with texts of the same salt alone.
        prompt_cache_key: texts with the same key prefer the same replicas.
        learn: whether drafters that learn may keep the text; by default they may.
    """

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    gamma: int | None
    max_nodes: int | None
    verifier: str | None
    verifier_options: Mapping[str, float] | None
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    min_tokens: int | None
    bad_words: Sequence[str | Sequence[int]] | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    log_probs: int | None
    prompt_log_probs: bool | None
    processed_log_probs: bool | None
    request_id: str | None
    cache_salt: str | None
    prompt_cache_key: str | None
    learn: bool | None


def generation_of(prompt: Prompt, options: Options) -> pb.Generation:
    """The request.

    Raises:
        Refused: an option is unknown, has the wrong type or is out of its field's range; or several
            grammars are asked for. The sentence begins with the option.
        TypeError: something is bytes, which could be read as token ids.
    """
    for name, value in {"prompt": prompt, **options}.items():
        parts = value if isinstance(value, (list, tuple)) else ()
        if any(isinstance(each, (bytes, bytearray)) for each in (value, *parts)):
            raise TypeError(f"{name}: bytes are neither text nor token ids; decode them first")
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - Options.__annotations__.keys():
        raise _refused(f"{min(unknown)}: there is no such option")
    try:
        return _generation_of(prompt, given)
    except (TypeError, ValueError) as error:
        raise _refused(_fault(prompt, given) or str(error)) from None


def _fault(prompt: Prompt, given: Mapping[str, Any]) -> str:
    """What is wrong with the first option that cannot be taken by itself; empty where each can."""
    for name, value in given.items():
        try:
            _generation_of("", {name: value})
        except (TypeError, ValueError):
            return f"{name}: {repr(value)[:_MOST_SHOWN]} has the wrong type or is out of range"
    try:
        _generation_of(prompt, {})
    except (TypeError, ValueError) as error:
        return f"prompt: {error}"
    return ""


def _refused(sentence: str) -> Refused:
    return Refused(f"INVALID_ARGUMENT: {sentence}", "INVALID_ARGUMENT")


def _generation_of(prompt: Prompt, given: dict[str, Any]) -> pb.Generation:
    stop, words = given.get("stop", ()), given.get("bad_words", ())
    words = [words] if isinstance(words, str) else words
    generation = pb.Generation(
        sampling=common_pb2.Sampling(
            **_of(given, "temperature", "top_k", "top_p", "min_p", "seed"),
            shaping=_shaping_of(given, [word for word in words if not isinstance(word, str)]),
        ),
        stopping=pb.Stopping(
            **_of(given, "max_new_tokens", "ignore_eos", "stop_token_ids"),
            stop_strings=[stop] if isinstance(stop, str) else stop,
        ),
        speculation=pb.Speculation(
            **_of(given, "gamma", "max_nodes", "verifier", "verifier_options")
        ),
        bad_strings=[word for word in words if isinstance(word, str)],
        log_probs=_log_probs_of(given),
        **_of(given, "request_id", "cache_salt", "prompt_cache_key", "learn"),
    )
    if isinstance(prompt, str):
        generation.prompt = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        for message in prompt:
            if not isinstance(message, Mapping):
                raise TypeError("a chat is a list of messages with their role and content")
            generation.chat.messages.add(**message)
    else:
        generation.prompt_token_ids.extend(prompt)  # type: ignore[arg-type]  # ids, then
    return generation


def _of(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _shaping_of(given: dict[str, Any], words: Sequence[Sequence[int]]) -> common_pb2.Shaping | None:
    """What shapes the logits; None for nothing."""
    grammars = {name: given.get(name) for name in ("json_schema", "regex", "grammar")}
    if isinstance(grammars["json_schema"], Mapping):
        grammars["json_schema"] = json.dumps(grammars["json_schema"], ensure_ascii=False)
    if "choice" in given:
        if grammars["grammar"] is not None:
            raise ValueError("grammar: it and choice exclude each other")
        choice = [given["choice"]] if isinstance(given["choice"], str) else given["choice"]
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
        grammars["grammar"] = f"start: {texts}"
    asked = {name: text for name, text in grammars.items() if text is not None}
    if len(asked) > 1:
        names = [name if name in given else "choice" for name in asked]
        raise ValueError(f"{names[0]}: it and {names[1]} exclude each other")
    controls = ("repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens")
    message = common_pb2.Shaping(
        **_of(given, "logit_bias", *controls),
        bad_words=[common_pb2.Shaping.Word(token_ids=word) for word in words],
        **{_GRAMMARS.get(name, name): text for name, text in asked.items()},
    )
    return message if message.ByteSize() else None


def _log_probs_of(given: Mapping[str, Any]) -> common_pb2.LogProbsSpec | None:
    names = ("log_probs", "prompt_log_probs", "processed_log_probs")
    if not any(name in given and given[name] is not False for name in names):
        return None
    top, prompt, processed = (given.get(name) for name in names)
    return common_pb2.LogProbsSpec(top=top or 0, prompt=bool(prompt), processed=bool(processed))
