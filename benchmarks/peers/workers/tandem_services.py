"""Tandem's three services, asked over gRPC like by any client; drafts by block verification."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import grpc

from benchmarks.measure.services import serving
from benchmarks.peers.protocol import Generate, Load, serve
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import CLIENT_OPTIONS
from tandem.tools.local.pair import Pair

_RULE = "block"
_TEXT_SECONDS = 300.0


class TandemServices:
    """Running services and a channel to them."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def load(self, load: Load) -> dict[str, str]:
        """Start the services; the drafter computes in float32, its default on a CPU."""
        pair = Pair(load.target, load.drafter, dtype=load.dtype, drafter_dtype="auto")
        stack = self._open.enter_context(serving(pair))
        self._loop = self._open.enter_context(asyncio.Runner())
        self._stub: Any = self._loop.run(self._connected(stack.addresses["orchestrator"]))
        return {name: version(name) for name in ("tandem-llm", "torch", "openvino")}

    async def _connected(self, address: str) -> Any:
        channel = grpc.aio.insecure_channel(address, options=list(CLIENT_OPTIONS))
        self._open.callback(lambda: self._loop.run(channel.close()))
        return orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

    def generate(self, generate: Generate) -> list[list[int]]:
        """A stream a text, all at once."""
        return self._loop.run(self._texts(generate))

    async def _texts(self, generate: Generate) -> list[list[int]]:
        asks = zip(generate.prompts, generate.seeds, strict=True)
        return await asyncio.gather(*(self._text(generate, *ask) for ask in asks))

    async def _text(self, generate: Generate, prompt: tuple[int, ...], seed: int) -> list[int]:
        generation = pb.Generation(
            prompt_token_ids=prompt,
            sampling=common_pb2.Sampling(temperature=generate.temperature, seed=seed),
            stopping=pb.Stopping(max_new_tokens=generate.new_tokens, ignore_eos=True),
            speculation=pb.Speculation(verifier=_RULE, gamma=generate.gamma),
        )
        request = pb.GenerateRequest(generation=generation)
        ids: list[int] = []
        async for event in self._stub.Generate(request, timeout=_TEXT_SECONDS):
            ids += [token.id for token in event.round.tokens]
        return ids

    def close(self) -> None:
        """Stop the services."""
        self._open.close()


if __name__ == "__main__":
    serve(TandemServices())
