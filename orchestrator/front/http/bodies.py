"""Bodies of requests, as OpenAI's API and its other servers have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from orchestrator.front.http.formats import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    grammar_of,
)
from orchestrator.front.validation import MAX_BAD_STRINGS, MOST_MESSAGES, new_seed
from orchestrator.text.values import Request
from tandem.errors import InvalidRequest
from tandem.speculation.request.log_probs import MOST_TOP, LogProbsWanted
from tandem.speculation.request.sampling import MAX_SEED, Sampling
from tandem.speculation.request.shaping import MOST_BIASED, Shaping

_log = structlog.get_logger(__name__)

# Of fields that are told in the log, each once.
_MOST_UNKNOWN = 64
_unknown: set[str] = set()

# Of fields with several kinds, pydantic's faults speak of each kind.
_UNIONS = {
    "stop": "a string, or a list of strings",
    "tool_choice": 'a string: "auto" or "none"',
}
# As texts name it.
_LIMIT = "max_new_tokens"
# Of a token id.
_DIGITS = 10
_MOST_TOOLS, _MOST_STOPS = 256, 64


def _ids(value: Any) -> list[int]:
    """Token ids; a million take a tenth of a second."""
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError("it must be a list of token ids")
    if value and not 0 <= min(value) <= max(value) < 2**32:
        raise ValueError("a token id is out of range")
    return value


def _prompt(value: Any) -> Any:
    """Text, token ids, or a list of either, as its first part says."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(value, str) or value == []:
        return value
    if isinstance(value, list) and type(first) is int:
        return _ids(value)
    if isinstance(value, list) and all(type(one) is type(first) for one in value):
        if isinstance(first, str):
            return value
        if isinstance(first, list):
            return [_ids(one) for one in value]
    raise ValueError("it must be text, token ids, or a list of either")


_Ids = Annotated[list[int], PlainValidator(_ids)]


class Body(BaseModel):
    """Of a request. It takes unknown fields, and the log tells of each once."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, hide_input_in_errors=True)


class _Exact(BaseModel):
    """An object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class StreamOptions(_Exact):
    """Of a streamed text.

    Attributes:
        include_usage: end with a chunk that has the usage.
        include_obfuscation: known, and without an effect here.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Speculation(_Exact):
    """How a text is drafted and verified, and how much of it is told.

    Attributes:
        verifier: see Speculation in orchestrator.proto, as for the next three.
        gamma: draft length.
        max_nodes: of a tree.
        verifier_options: by their names.
        tokens: each chunk, or the whole choice, has its tokens with their origins; the last one
            has where the time went.
        processed_logprobs: log probabilities are of the distribution that tokens are drawn from.
    """

    verifier: str | None = None
    gamma: Annotated[int, Field(ge=0)] | None = None
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    verifier_options: dict[str, float] = {}
    tokens: bool = False
    processed_logprobs: bool = False


class Generating(Body):
    """What both calls that generate have in common.

    Attributes:
        unsupported: fields that OpenAI's API or its other servers have and this one has not, with
            the values that ask for nothing.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "prompt_logprobs": (None,),
        "use_beam_search": (None, False),
        "length_penalty": (None, 1, 1.0),
        "allowed_token_ids": (None,),
        "truncate_prompt_tokens": (None,),
        "skip_special_tokens": (None, True),
    }
    # Known, and without an effect here.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
    )

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, lt=2**32)
    min_p: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=_MOST_STOPS)] | None = None
    stop_token_ids: _Ids | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASED)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**32)] = 0
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=MAX_BAD_STRINGS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Older names of the same.
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    tandem: Speculation = Speculation()

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the model is shown; None for none.

        Raises:
            InvalidRequest: the model would have to call one.
        """
        return None

    @property
    def log_probs(self) -> LogProbsWanted | None:
        """That come with the tokens; None for none.

        Raises:
            InvalidRequest: they are too many.
        """
        return None

    def _log_probs(self, name: str, top: int, *, prompt: bool = False) -> LogProbsWanted:
        """What a field asks for."""
        if not 0 <= top <= MOST_TOP:
            raise InvalidRequest(f"{name} must be 0..{MOST_TOP}, got {top}")
        return LogProbsWanted(top, self.tandem.processed_logprobs, prompt)

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """An error with the names that the caller used."""
        return error

    @property
    def limit(self) -> int | None:
        """Most tokens to generate; None takes the default."""
        return self.max_tokens

    def request(
        self, prompt: str | list[int], choice: int, request_id: str, *, special: bool = True
    ) -> Request:
        """A text that is asked for.

        Args:
            prompt: of it.
            choice: its number among the texts of the call; each has numbers of its own.
            request_id: of it.
            special: whether the tokenizer adds tokens of its own to a prompt.

        Raises:
            InvalidRequest: the sampling is out of range.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "min_p": self.min_p,
            # Other servers say -1 where all tokens are kept.
            "top_k": 0 if self.top_k == -1 else self.top_k,
        }
        seed = new_seed() if self.seed is None else self.seed + choice
        try:
            sampling = Sampling(
                **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
                seed=seed & MAX_SEED,
                shaping=self._shaping(),
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        own = self.tandem
        return Request(
            sampling=sampling,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=() if isinstance(prompt, str) else prompt,
            request_id=request_id,
            max_new_tokens=self.limit,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids or (),
            stop_strings=[self.stop] if isinstance(self.stop, str) else self.stop or (),
            verifier=own.verifier,
            gamma=own.gamma,
            nodes=own.max_nodes,
            verifier_options=own.verifier_options,
            special_tokens=special,
            bad_strings=self.bad_words or (),
            log_probs=self.log_probs,
        )

    def _shaping(self) -> Shaping:
        """Of the logits.

        Raises:
            ValueError: a value is out of range; the message begins with its name.
        """
        guided = StructuredOutputs.model_construct(
            by_json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        return Shaping(
            _bias_of(self.logit_bias or {}),
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            self.frequency_penalty or 0.0,
            self.presence_penalty or 0.0,
            self.min_tokens,
            grammar=grammar_of(self.response_format, self.structured_outputs, guided),
        )


def _bias_of(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """The bias by token ids, which JSON's keys are as text.

    Raises:
        ValueError: a key is none.
    """
    if any(not key.isdecimal() or len(key) > _DIGITS for key in given):
        raise ValueError("logit_bias: its keys must be token ids")
    return tuple(sorted((int(key), bias) for key, bias in given.items()))


class CompletionBody(Generating):
    """The body of /v1/completions."""

    unsupported: ClassVar = {
        **Generating.unsupported,
        "suffix": (None, ""),
    }

    prompt: Annotated[Any, PlainValidator(_prompt)]
    echo: bool = False
    logprobs: int | None = None
    # OpenAI's default.
    max_tokens: int | None = 16

    @property
    def log_probs(self) -> LogProbsWanted | None:
        """See `Generating`."""
        if self.logprobs is None:
            return None
        return self._log_probs("logprobs", self.logprobs, prompt=self.echo)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of them.

        Raises:
            InvalidRequest: there is none, or one is empty.
        """
        prompt = self.prompt
        alone = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts: list[str | list[int]] = [prompt] if alone else list(prompt)
        if not prompts or not all(prompts):
            raise InvalidRequest("prompt must not be empty")
        return prompts


class ChatMessage(Body):
    """A message of a chat. Templates read other fields too.

    Attributes:
        role: who speaks.
        content: what is said: text, or parts that are text.
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None

    def fields(self, number: int) -> dict[str, Any]:
        """As a template reads it: content is text, and what was thought has all of its names.

        Args:
            number: of the message.

        Raises:
            InvalidRequest: a part is no text.
        """
        fields = {"role": self.role, "content": self.content, **(self.model_extra or {})}
        if isinstance(self.content, list):
            texts = [part.get("text") for part in self.content if part.get("type") == "text"]
            if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
                raise InvalidRequest(f"messages.{number}.content: only parts of type text are read")
            fields["content"] = "\n".join(str(text) for text in texts)
        names = ("reasoning_content", "thinking", "reasoning")
        thought = next((fields[name] for name in names if fields.get(name) is not None), None)
        if thought is not None:
            fields = {"thinking": thought, **fields, "reasoning_content": thought}
        # Templates write the arguments of calls as they would write any JSON.
        calls = fields.get("tool_calls") or []
        if not isinstance(calls, list):
            raise InvalidRequest(f"messages.{number}.tool_calls: it must be a list")
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                with suppress(ValueError, RecursionError):
                    function["arguments"] = json.loads(function["arguments"])
        return fields


_Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=_MOST_TOOLS)]


class ChatBody(Generating):
    """The body of /v1/chat/completions.

    Attributes:
        tools: that the model may call.
        tool_choice: "none" shows the model no tools.
    """

    unsupported: ClassVar = {
        **Generating.unsupported,
        "functions": (None,),
        "function_call": (None,),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "continue_final_message": (None, False),
        "chat_template": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
    }
    ignored: ClassVar = Generating.ignored | {"parallel_tool_calls"}

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    ]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=_MOST_TOOLS)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def log_probs(self) -> LogProbsWanted | None:
        """See `Generating`."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs needs logprobs")
            return None
        return self._log_probs("top_logprobs", self.top_logprobs or 0)

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """See `Generating`."""
        sentence = str(error)
        if self.max_completion_tokens is None or not sentence.startswith(_LIMIT):
            return error
        return InvalidRequest("max_completion_tokens" + sentence.removeprefix(_LIMIT))

    @property
    def limit(self) -> int | None:
        """See `Generating`; the newer name counts."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """See `Generating`."""
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                'tool_choice: "auto" and "none" are supported; no tool can be forced here'
            )
        return None if self.tool_choice == "none" else self.tools or None


class TokenizeBody(Body):
    """The body of /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: _Ids


B = TypeVar("B", bound=Body)


def read(kind: type[B], body: bytes) -> B:
    """A body.

    Raises:
        InvalidRequest: it is not what it should be; the sentence begins with the field.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else "no valid JSON"
        raise InvalidRequest(f"body: {why}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body: it must be a JSON object")
    if b"\\ud" in body.lower():
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidRequest("body: it has half a character (a lone surrogate)") from None
    try:
        # Clients send null for what was not set.
        found = kind.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise InvalidRequest(_sentence(error)) from None
    extra = found.model_extra or {}
    if isinstance(found, Generating):
        for name, nothing in found.unsupported.items():
            # True is 1 in Python, and asks for something.
            if name in extra and not any(
                extra[name] == value and isinstance(extra[name], bool) == isinstance(value, bool)
                for value in nothing
            ):
                raise InvalidRequest(f"{name} is not supported here; leave it out")
        extra = {name: 0 for name in extra if name not in {*found.unsupported, *found.ignored}}
    _tell(kind.__name__, extra)
    return found


def _sentence(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    first, *rest = fault["loc"] or ("body",)
    if first in _UNIONS:
        return f"{first}: it must be {_UNIONS[first]}"
    where = ".".join(map(str, (first, *rest)))
    said = str(fault["msg"]).removeprefix("Value error, ")
    return f"{where}: {said[:1].lower()}{said[1:]}"


def _tell(kind: str, names: Mapping[str, Any]) -> None:
    for name in names:
        key = f"{kind}.{name[:64]}"
        if key not in _unknown and len(_unknown) < _MOST_UNKNOWN:
            _unknown.add(key)
            _log.warning("a request has a field that is not known here", field=key)
