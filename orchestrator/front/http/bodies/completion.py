"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator

from orchestrator.front.http.bodies.fields import ids
from orchestrator.front.http.bodies.generating import Generating
from tandem.errors import InvalidRequest
from tandem.speculation.request.log_probs import LogProbsWanted


def _prompt(value: Any) -> Any:
    """Text, token ids, or a list of either, as its first part says."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(value, str) or value == []:
        return value
    if isinstance(value, list) and type(first) is int:
        return ids(value)
    if isinstance(value, list) and all(type(one) is type(first) for one in value):
        if isinstance(first, str):
            return value
        if isinstance(first, list):
            return [ids(one) for one in value]
    raise ValueError("it must be text, token ids, or a list of either")


class CompletionBody(Generating):
    """The body of /v1/completions."""

    unsupported: ClassVar = {
        **Generating.unsupported,
        "suffix": (None, ""),
        "add_special_tokens": (None, True),
    }
    # OpenAI's.
    default_limit: ClassVar = 16

    prompt: Annotated[Any, PlainValidator(_prompt)]
    echo: bool = False
    logprobs: int | None = None

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
