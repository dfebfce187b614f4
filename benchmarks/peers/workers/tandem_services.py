"""Tandem's services, called over gRPC as by any client: three, or two with `--inside`.

With `--vllm` vLLM computes the target.

A text comes in one answer, as the other engines give it; with `--streamed`, round by round.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.measure.environment import versions
from benchmarks.measure.services import serving
from benchmarks.measure.texts import asked
from benchmarks.peers.protocol import Generate, Load, serve
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair

_USUAL_RULE = "block"
_TEXT_SECONDS = 300.0
# The other engines have their models on the same device.
_ON_A_DEVICE = {"CACHE_TOKENS": "8192"}


class TandemServices:
    """Running services and a connection to them.

    Attributes:
        timelines: of the last texts, for the protocol.

    Args:
        inside: whether the target drafts, instead of a drafter.
        streamed: whether texts come round by round.
        by_vllm: whether vLLM computes the target.
        prefix_cache: whether texts share the prefixes of their prompts. Turns repeat them.
    """

    def __init__(
        self,
        inside: bool = False,
        streamed: bool = False,
        by_vllm: bool = False,
        prefix_cache: bool = False,
    ) -> None:
        self._inside = inside
        self._own = {"PREFIX_CACHE": str(prefix_cache).lower()}
        self._engine = "vllm" if by_vllm else "auto"
        self._streamed = streamed
        self._open = ExitStack()
        self.timelines: list[dict[str, Any]] = []

    def load(self, load: Load) -> dict[str, str]:
        """Start the services; the drafter has the dtype that it finds fastest."""
        os.environ["TANDEM_TARGET_ENGINE"] = self._engine
        pair = Pair(
            load.target,
            load.drafter or None,  # a target without a drafter looks up
            load.device,
            load.device,
            dtype=load.dtype,
            drafter_dtype="auto",
            inside=self._inside,
        )
        own = self._own | ({} if load.device == "cpu" else _ON_A_DEVICE)
        more = dict.fromkeys(("target", "drafter"), own)
        stack = self._open.enter_context(serving(pair, more))
        self._loop = self._open.enter_context(asyncio.Runner())
        generator = LoadGenerator(stack.addresses["orchestrator"], _TEXT_SECONDS)
        self._generator = self._loop.run(generator.__aenter__())
        self._open.callback(lambda: self._loop.run(generator.__aexit__(None, None, None)))
        return versions("tandem-llm", "torch", "openvino")

    def generate(self, generate: Generate) -> list[list[int]]:
        """One call per text, all at once."""
        return self._loop.run((self._texts if self._streamed else self._whole)(generate))

    async def _whole(self, generate: Generate) -> list[list[int]]:
        asked = [_asked(generate, number) for number in range(len(generate.prompts))]
        replies = await asyncio.gather(*(self._generator.whole(each) for each in asked))
        return [list(reply.token_ids) for reply in replies]

    async def _texts(self, generate: Generate) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in generate.prompts]
        timelines = await asyncio.gather(
            *(
                self._generator.text(_asked(generate, number), seen=_into(text))
                for number, text in enumerate(texts)
            )
        )
        if failed := [timeline.error for timeline in timelines if timeline.error]:
            raise RuntimeError(failed[0])
        self.timelines = [timeline.as_json() for timeline in timelines]
        return texts

    def close(self) -> None:
        """Stop the services."""
        self._open.close()


def _asked(ask: Generate, number: int) -> pb.Generation:
    prompt, rule = ask.prompts[number], ask.rule or _USUAL_RULE
    size = {"verifier": rule, "gamma": ask.gamma}
    return asked(ask.seeds[number], ask.new_tokens, ask.temperature, prompt, **size)


def _into(text: list[int]) -> Callable[[pb.GenerateResponse], None]:
    return lambda event: text.extend(token.id for token in event.round.tokens)


if __name__ == "__main__":
    options = ("--inside", "--streamed", "--vllm", "--prefix-cache")
    serve(TandemServices(*(option in sys.argv for option in options)))
