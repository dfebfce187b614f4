"""What the bodies of calls that generate have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from orchestrator.front.http.bodies.fields import Body, Exact, Ids
from orchestrator.front.http.bodies.formats import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    grammars_of,
)
from orchestrator.front.http.errors import InHttpWords
from orchestrator.front.validation import MAX_BAD_STRINGS, MOST_CACHE_NAME, new_seed
from tandem.errors import InvalidRequest
from tandem.peers.text.values import Request
from tandem.speculation.request.log_probs import MOST_TOP, LogProbsWanted
from tandem.speculation.request.sampling import MAX_SEED, Sampling
from tandem.speculation.request.shaping import MOST_BIASED, Grammar, Shaping

# A seed for which one is drawn.
_DRAWN = -1
# Of a token id.
_DIGITS = 10
_MOST_STOPS = 64


class StreamOptions(Exact):
    """Of a streamed text.

    Attributes:
        include_usage: end with a chunk that has the usage.
        include_obfuscation: known, and without an effect here.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Speculation(Exact):
    """How a text is drafted and verified, and how much of it is told.

    Attributes:
        verifier: see Speculation in orchestrator.proto, as for the next three.
        gamma: draft length.
        max_nodes: of a tree.
        verifier_options: by their names.
        tokens: each chunk, or the whole choice, has its tokens with their origins; the last one
            has where the time went.
        processed_logprobs: log probabilities are of the distribution that tokens are drawn from.
        learn: whether drafters that learn may keep the text; None as True.
    """

    verifier: str | None = None
    gamma: Annotated[int, Field(ge=0)] | None = None
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    verifier_options: dict[str, float] = Field(default_factory=dict)
    tokens: bool = False
    processed_logprobs: bool = False
    learn: bool | None = None


class Generating(Body):
    """What both calls that generate have in common.

    Attributes:
        unsupported: fields that OpenAI's API or its other servers have and this one has not, with
            the values that ask for nothing.
        renamed: names that other servers have for fields of ours.
        default_limit: most tokens to generate where the body names no limit; None takes the
            orchestrator's.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "prompt_logprobs": (None,),
        "use_beam_search": (None, False),
        "num_beams": (None, 1),
        "length_penalty": (None, 1, 1.0),
        "allowed_token_ids": (None,),
        "truncate_prompt_tokens": (None,),
        "skip_special_tokens": (None, True),
        "spaces_between_special_tokens": (None, True),
        "return_token_ids": (None, False),
        "return_tokens_as_token_ids": (None, False),
        "priority": (None, 0),
        "thinking_token_budget": (None,),
        "logits_processors": (None, []),
        "prompt_embeds": (None,),
        "typical_p": (None, 1, 1.0),
        "no_repeat_ngram_size": (None, 0),
        "mirostat": (None, 0),
        "lora_request": (None,),
    }
    renamed: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "n_predict": "max_tokens",
        "min_new_tokens": "min_tokens",
        "repeat_penalty": "repetition_penalty",
        "json_schema": "guided_json",
        "regex": "guided_regex",
        "choice": "guided_choice",
        "grammar": "guided_grammar",
        "stop_words": "stop",
        "num_return_sequences": "n",
        "verifier": "tandem.verifier",
        "gamma": "tandem.gamma",
        "learn": "tandem.learn",
    }
    # Known, and without an effect here; docs/http.md lists them.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "store",
            "metadata",
            "service_tier",
            "safety_identifier",
            "prompt_cache_retention",
        }
    )
    default_limit: ClassVar[int | None] = None

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, lt=2**32)
    min_p: float | None = None
    seed: Annotated[int, Field(ge=_DRAWN, le=MAX_SEED)] | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=_MOST_STOPS)] | None = None
    stop_token_ids: Ids | None = None
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
    cache_salt: Annotated[str, Field(min_length=1, max_length=MOST_CACHE_NAME)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MOST_CACHE_NAME)] | None = None
    tandem: Speculation = Speculation()

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the model is shown; None for none.

        Raises:
            InvalidRequest: the model would have to call one.
        """
        return None

    @property
    def most_calls(self) -> int | None:
        """Of tools, that a text may have; None for any number."""
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
        return InHttpWords(str(error), self.own_names)

    @property
    def own_names(self) -> dict[str, str]:
        """The fields that the caller used, by gRPC's names, of those that may have several."""
        return {"grammar": next(iter(self._grammars), "grammar")}

    @property
    def limit(self) -> int | None:
        """Most tokens to generate; None takes the default."""
        return self.max_tokens

    @property
    def _grammars(self) -> dict[str, Grammar]:
        """The grammars that are asked for, by their fields."""
        guided = StructuredOutputs.model_construct(
            by_json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        return grammars_of(self.response_format, self.structured_outputs, guided)

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
        # Other servers say -1 where they draw a seed. The last one is followed by the first.
        wanted = None if self.seed == _DRAWN else self.seed
        seed = new_seed() if wanted is None else (wanted + choice) % (MAX_SEED + 1)
        try:
            sampling = Sampling(
                **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
                seed=seed,
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
            default_new_tokens=self.default_limit,
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
            seeded=wanted is not None,
            cache_salt=self.cache_salt or "",
            cache_key=self.prompt_cache_key or "",
            learn=own.learn is not False,
        )

    def _shaping(self) -> Shaping:
        """Of the logits.

        Raises:
            InvalidRequest: several grammars are asked for.
            ValueError: a value is out of range; the message begins with its name.
        """
        grammars = self._grammars
        if len(grammars) > 1:
            first, second, *_ = grammars
            raise InvalidRequest(f"{first}: it and {second} both ask for a grammar; leave one out")
        return Shaping(
            _bias_of(self.logit_bias or {}),
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            self.frequency_penalty or 0.0,
            self.presence_penalty or 0.0,
            self.min_tokens,
            grammar=next(iter(grammars.values()), None),
        )


def _bias_of(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """The bias by token ids, which JSON's keys are as text.

    Raises:
        ValueError: a key is none.
    """
    if any(not key.isdecimal() or len(key) > _DIGITS for key in given):
        raise ValueError("logit_bias: its keys must be token ids")
    return tuple(sorted((int(key), bias) for key, bias in given.items()))
