"""Servers with OpenAI's API beside each other, in turn: `vllm serve` without and with drafts.

    python -m benchmarks.plugin plain=http://127.0.0.1:8001 "level 1"=http://127.0.0.1:8003

Start the servers as docs/vllm-plugin.md says, all with one model. Ratios are to the first server.
Their counters tell the tokens that a pass with a draft gives.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.request
from dataclasses import dataclass, field
from statistics import median

from openai import AsyncOpenAI
from rich.console import Console

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.tables import table_of

# Beginnings of files: texts that the built-in pair continues.
PROMPTS = ("import os\n", "def main(", "class Reader:\n", "from pathlib import Path\n\n\ndef ")
_DRAFTS, _KEPT = (f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "accepted_tokens"))


@dataclass
class Server:
    """A server and what was measured of it.

    Attributes:
        name: for the table.
        url: of its host and port.
        speeds: tokens a second, turn by turn.
    """

    name: str
    url: str
    speeds: list[float] = field(default_factory=list)

    async def write(self, texts: int, tokens: int, temperature: float, seed: int) -> None:
        """Texts, all at once; as many each turn."""
        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none") as client:
            model = (await client.models.list()).data[0].id
            began = time.perf_counter()
            found = await asyncio.gather(
                *(
                    client.completions.create(
                        model=model,
                        prompt=PROMPTS[text % len(PROMPTS)],
                        max_tokens=tokens,
                        temperature=temperature,
                        seed=seed + text,
                        extra_body={"ignore_eos": True},
                    )
                    for text in range(texts)
                )
            )
        written = sum(answer.usage.completion_tokens for answer in found if answer.usage)
        self.speeds.append(written / (time.perf_counter() - began))

    def counter(self, name: str) -> float:
        """Of its metrics; 0 where it has none of the name."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def main() -> None:
    """Measure, print and write benchmarks/results/plugin.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    places = dict(each.split("=", 1) for each in options.servers)
    lines = []
    for texts in options.texts:
        for temperature in options.temperatures:
            servers = [Server(name, url) for name, url in places.items()]
            before = {each.name: (each.counter(_DRAFTS), each.counter(_KEPT)) for each in servers}
            for turn in range(options.turns + 1):  # the first one warms up
                for server in servers:
                    asyncio.run(server.write(texts, options.tokens, temperature, 1000 * turn))
            for server in servers:
                drafts, kept = before[server.name]
                drafts, kept = server.counter(_DRAFTS) - drafts, server.counter(_KEPT) - kept
                own, first = server.speeds[1:], servers[0].speeds[1:]
                lines.append(
                    {
                        "texts": texts,
                        "T": temperature,
                        "server": server.name,
                        "tokens/s": median(own),
                        "ratio": median(a / b for a, b in zip(own, first, strict=True)),
                        "tokens a pass": 1 + kept / drafts if drafts else 1.0,
                    }
                )
    Console(width=120).print(table_of(lines))
    keep(RESULTS / "plugin.json", tokens=options.tokens, turns=options.turns, lines=lines)


if __name__ == "__main__":
    main()
