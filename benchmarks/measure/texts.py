"""The requests of all benchmarks, and the summaries of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.timeline import Timeline

PROMPTS = ("def ", "class ", "import os\n", "    for ", "    if not ", '"""', "# ", "return ")


def asked(
    seed: int,
    new_tokens: int,
    temperature: float = 1.0,
    prompt: Sequence[int] | None = None,
    **speculation: Any,
) -> pb.Generation:
    """A request for a text that goes on past any end of text.

    Args:
        seed: of its draws; it also selects the prompt among `PROMPTS`.
        new_tokens: number of tokens.
        temperature: 0 takes the likeliest token.
        prompt: token ids to continue instead.
        speculation: fields of the message of that name; by default the orchestrator's settings.
    """
    message = pb.Generation(
        sampling=common_pb2.Sampling(temperature=temperature, seed=seed),
        stopping=pb.Stopping(max_new_tokens=new_tokens, ignore_eos=True),
        speculation=pb.Speculation(**speculation),
    )
    if prompt is None:
        message.prompt = PROMPTS[seed % len(PROMPTS)]
    else:
        message.prompt_token_ids.extend(prompt)
    return message


def token_ids(seed: int, count: int) -> list[int]:
    """A prompt for models that have no tokenizer."""
    return [1 + (seed * 7 + place) % 2000 for place in range(count)]


def summaries(timelines: Iterable[Timeline]) -> list[pb.Summary]:
    """The summaries of texts, all of which must have ended well.

    Raises:
        RuntimeError: a text failed; figures without it would be too good.
    """
    texts = list(timelines)
    found = [text.summary for text in texts if text.summary is not None]
    if failed := [text.error for text in texts if text.summary is None]:
        raise RuntimeError(f"{len(failed)} texts failed, the first with {failed[0]}")
    return found
