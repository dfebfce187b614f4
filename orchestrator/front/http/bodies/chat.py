"""The body of /v1/chat/completions."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, ClassVar

from pydantic import Field

from orchestrator.front.http.bodies.fields import Body
from orchestrator.front.http.bodies.generating import Generating
from orchestrator.front.validation import MOST_MESSAGES
from tandem.errors import InvalidRequest
from tandem.speculation.request.log_probs import LogProbsWanted

_MOST_TOOLS = 256


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
        parallel_tool_calls: whether an answer may call several.
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
        "add_special_tokens": (None, False),
        "echo": (None, False),
        "documents": (None, []),
        "include_reasoning": (None, True),
    }

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    ]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: _Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most_calls(self) -> int | None:
        """See `Generating`."""
        return None if self.parallel_tool_calls else 1

    @property
    def log_probs(self) -> LogProbsWanted | None:
        """See `Generating`."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs needs logprobs")
            return None
        return self._log_probs("top_logprobs", self.top_logprobs or 0)

    @property
    def own_names(self) -> dict[str, str]:
        """See `Generating`."""
        newer = self.max_completion_tokens is not None
        limit = "max_completion_tokens" if newer else "max_tokens"
        return {**super().own_names, "max_new_tokens": limit, "prompt": "messages"}

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
