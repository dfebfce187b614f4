"""Bodies of replies: whole ones and chunks, of both calls that generate."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from orchestrator.front.http.log_probs import Spell, Told, of_chat, of_completion
from orchestrator.front.http.tools import ToolCall
from tandem.peers.text.values import FinishReason, Round, Summary
from tandem.telemetry.stages import WAITS

_REASONS = {FinishReason.LENGTH: "length"}
# No token could come: OpenAI has no name for that.
_ENDS = {FinishReason.DEAD_END: FinishReason.DEAD_END.value}

Json = dict[str, Any]


def encoded(body: Json) -> bytes:
    """As it is sent. Half a character that a prompt spelled as a surrogate is told as it came."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def event_of(body: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + encoded(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def tokens_of(round_: Round) -> list[Json]:
    """A round's tokens with their origins."""
    return [
        {"id": t.id, "text": t.text, "origin": t.origin.value, "siblings": t.siblings}
        for t in round_.tokens
    ]


def stages_of(summary: Summary) -> Json:
    """Where a text's time went, in milliseconds; the names are those of `Stages`."""
    return {name: round(summary.times.spent_ns(name) / 1e6, 3) for name in WAITS}


def finish_of(summary: Summary, called: bool) -> Json:
    """Why a text ended: as OpenAI says it, and which stop string or token id it was.

    Args:
        summary: of the text.
        called: whether it calls tools.
    """
    own = "tool_calls" if called else "stop"
    reason = summary.stop_string or _ENDS.get(summary.finish_reason)
    return {
        "finish_reason": _REASONS.get(summary.finish_reason, own),
        "stop_reason": summary.stop_token_id if reason is None else reason,
    }


class Usage:
    """What the texts of a call have cost so far."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._tokens = self._rounds = self._undrafted = self._drafted = self._accepted = 0
        self._weights_version = 0

    def add_round(self, round_: Round) -> None:
        """Tokens came."""
        self._tokens += len(round_.tokens)

    def add(self, prompt: int, summary: Summary) -> None:
        """A text ended.

        Args:
            prompt: its number; texts of one prompt count it once.
            summary: of the text.
        """
        counts = summary.counts
        self._prompts[prompt] = len(summary.generation.prompt_ids)
        # Of a prompt's texts, the first one that ends: those beside it may find what it computed.
        self._cached.setdefault(prompt, counts.cached_tokens.get("target", 0))
        self._rounds += len(counts.gammas)
        self._undrafted += counts.undrafted_rounds
        self._drafted += counts.drafted_tokens
        self._accepted += counts.accepted_tokens
        self._weights_version = counts.weights_version

    def body(self) -> Json:
        """As OpenAI has it; `tandem` has what drafts did for it."""
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "tandem": {
                "rounds": self._rounds,
                "undrafted_rounds": self._undrafted,
                "drafted_tokens": self._drafted,
                "accepted_tokens": self._accepted,
                "acceptance_rate": self._accepted / self._drafted if self._drafted else 0.0,
                "drafter_weights_version": self._weights_version,
            },
        }


class Form(ABC):
    """How a call's replies look.

    Args:
        name: of the reply.
        created: seconds since 1970.
        model: that is served.
        spell: the bytes of a token.
    """

    prefix: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]

    log_probs_as: ClassVar[Callable[[Sequence[Told], Spell], Json]]

    def __init__(self, name: str, created: int, model: str, spell: Spell) -> None:
        self._spell = spell
        self._head = {"id": f"{self.prefix}-{name}", "created": created, "model": model}

    @abstractmethod
    def choice(self, index: int, text: str, calls: Sequence[ToolCall], finish: Json) -> Json:
        """A whole text, and the calls of tools in it."""

    @abstractmethod
    def first(self, index: int) -> Json | None:
        """What comes before a text's first part; None for nothing."""

    @abstractmethod
    def delta(self, index: int, text: str, calls: Sequence[Json]) -> Json:
        """Part of a text."""

    @abstractmethod
    def last(self, index: int, text: str, calls: Sequence[Json], finish: Json) -> Json:
        """The end of a text."""

    def log_probs(self, tokens: Sequence[Told]) -> Json:
        """Of a text's tokens, or of a part of them."""
        return type(self).log_probs_as(tokens, self._spell)

    def reply(self, choices: Sequence[Json], usage: Json) -> Json:
        """All texts."""
        return {**self._head, "object": self.whole, "choices": choices, "usage": usage}

    def chunk(self, choice: Json | None, usage: Json | None = None) -> Json:
        """A part of a text, or, with no choice, the usage at the end."""
        choices = [] if choice is None else [choice]
        body = {**self._head, "object": self.part, "choices": choices}
        return body if usage is None else {**body, "usage": usage}


class CompletionForm(Form):
    """Of /v1/completions, which has no tools."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"
    log_probs_as = of_completion

    def choice(self, index: int, text: str, calls: Sequence[ToolCall], finish: Json) -> Json:
        """See `Form`."""
        return {"index": index, "text": text, "logprobs": None, **finish}

    def first(self, index: int) -> Json | None:
        """See `Form`."""
        return None

    def delta(self, index: int, text: str, calls: Sequence[Json]) -> Json:
        """See `Form`."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def last(self, index: int, text: str, calls: Sequence[Json], finish: Json) -> Json:
        """See `Form`."""
        return self.choice(index, text, (), finish)


class ChatForm(Form):
    """Of /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    log_probs_as = of_chat

    def choice(self, index: int, text: str, calls: Sequence[ToolCall], finish: Json) -> Json:
        """See `Form`."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            told = [call.body() for call in calls]
            message |= {"content": text or None, "tool_calls": told}
        return {"index": index, "message": message, "logprobs": None, **finish}

    def first(self, index: int) -> Json | None:
        """See `Form`."""
        return self._part(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str, calls: Sequence[Json]) -> Json:
        """See `Form`."""
        content = {"content": text} if text or not calls else {}
        return self._part(index, {**content, **({"tool_calls": calls} if calls else {})})

    def last(self, index: int, text: str, calls: Sequence[Json], finish: Json) -> Json:
        """See `Form`."""
        part = self.delta(index, text, calls) if text or calls else self._part(index, {})
        return {**part, **finish}

    def _part(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
