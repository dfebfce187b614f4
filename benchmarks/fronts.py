"""HTTP beside gRPC: the orchestrator's CPU time a token, and the first chunk, in turn.

    python -m benchmarks.fronts [--texts 1 64] [--turns 5]

The pair of `benchmarks.overhead`, which costs almost nothing: nearly all of the time is the host's
own work. Both clients are asyncio and read each chunk; HTTP has a connection for each text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc
from rich.console import Console

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, token_ids
from benchmarks.measure.vitals import cpu_seconds
from benchmarks.overhead import save_pair
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair

NEW_TOKENS, GAMMA, PROMPT = 200, 4, 8
FRONTS = ("grpc", "http")


@dataclass(frozen=True)
class Text:
    """When a text's first chunk came, and how many tokens it has."""

    first_ms: float
    tokens: int


async def by_grpc(stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub, seed: int) -> Text:
    """A streamed text."""
    generation = asked(seed, NEW_TOKENS, prompt=token_ids(seed, PROMPT), gamma=GAMMA)
    began, first, tokens = time.perf_counter(), 0.0, 0
    async for reply in stub.Generate(pb.GenerateRequest(generation=generation)):
        first = first or time.perf_counter() - began
        tokens += len(reply.round.tokens)
    return Text(first * 1e3, tokens)


async def by_http(address: str, seed: int) -> Text:
    """The same by a connection of its own, which is there already.

    Raises:
        RuntimeError: the call failed.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(
        {
            "prompt": token_ids(seed, PROMPT),
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            # This pair has no text: as by gRPC, chunks have ids and origins.
            "tandem": {"gamma": GAMMA, "tokens": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n"
    began, first, usage = time.perf_counter(), 0.0, 0
    writer.write(f"{head}\r\n".encode() + body)
    while True:
        line = await reader.readline()
        if line.startswith(b"data: "):
            first = first or time.perf_counter() - began
            if line.startswith(b"data: [DONE]"):
                break
            if b'"usage":' in line:
                usage = json.loads(line[6:])["usage"]["completion_tokens"]
        elif not line or (line.startswith(b"HTTP/1.1") and b" 200 " not in line):
            raise RuntimeError(f"the call failed: {line!r}")
    writer.close()
    return Text(first * 1e3, usage)


async def measure(
    addresses: dict[str, str], front: str, at_once: int, first_seed: int
) -> list[Text]:
    """So many clients, three texts each."""
    async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

        async def client(number: int) -> list[Text]:
            seeds = range(first_seed + 3 * number, first_seed + 3 * number + 3)
            if front == "grpc":
                return [await by_grpc(stub, seed) for seed in seeds]
            return [await by_http(addresses["http"], seed) for seed in seeds]

        found = await asyncio.gather(*(client(i) for i in range(at_once)))
    return [text for texts in found for text in texts]


def main() -> None:
    """Measure, print and write benchmarks/results/fronts.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {role: str(path) for role, path in save_pair(Path(folder)).items()}
        pair = Pair(paths["target"], paths["drafter"], max_length=512)
        http = {"orchestrator": {"HTTP_LISTEN": "127.0.0.1:0"}}
        with serving(pair, http) as stack:
            addresses = {
                "grpc": stack.addresses["orchestrator"],
                "http": stack.further_addresses("HTTP_LISTEN")["orchestrator"],
            }
            pid = stack.processes["orchestrator"].id
            for at_once in options.texts:
                cpu: dict[str, list[float]] = {front: [] for front in FRONTS}
                first: dict[str, list[float]] = {front: [] for front in FRONTS}
                for turn in range(options.turns + 1):  # the first one warms up
                    for front in FRONTS:
                        before = cpu_seconds(pid)
                        texts = asyncio.run(measure(addresses, front, at_once, 1000 * turn))
                        if turn:
                            tokens = sum(text.tokens for text in texts)
                            cpu[front].append((cpu_seconds(pid) - before) / tokens * 1e6)
                            first[front].append(median(text.first_ms for text in texts))
                for front in FRONTS:
                    lines.append(
                        {
                            "texts": at_once,
                            "front": front,
                            "cpu_us_a_token": median(cpu[front]),
                            "first_chunk_ms": median(first[front]),
                            "cpu_of_grpc": median(cpu[front]) / median(cpu["grpc"]),
                        }
                    )
    Console(width=120).print(table_of(lines))
    keep(RESULTS / "fronts.json", new_tokens=NEW_TOKENS, gamma=GAMMA, lines=lines)


if __name__ == "__main__":
    main()
