"""Texts by JSON schemas: all parse and validate, and tokens a round with the drafter's hint.

    python -m benchmarks.schemas [--texts 500] [--clients 8] [--gamma 4]

The drafter shapes its own logits as the target does, or leaves that out: the law is the same, and
what differs is how many of its tokens are kept. Both ways get the same schemas and seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jsonschema
from rich.console import Console

import tandem
from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from tandem.tools.local.pair import Pair

# Bounded, so that each text ends by itself.
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
_WORD = {"type": "string", "pattern": "^[a-z_]{1,12}$"}
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "point": {"type": "object", "properties": {"x": _NUMBER, "y": _NUMBER}},
    "person": {
        "type": "object",
        "properties": {"name": _WORD, "age": _NUMBER, "admin": {"type": "boolean"}},
    },
    "list": {"type": "array", "items": _WORD, "minItems": 1, "maxItems": 5},
    "enum": {"type": "object", "properties": {"kind": {"enum": ["function", "class", "module"]}}},
    "nested": {
        "type": "object",
        "properties": {
            "id": _NUMBER,
            "tags": {"type": "array", "items": _WORD, "maxItems": 3},
            "at": {
                "type": "object",
                "properties": {"file": _WORD, "line": _NUMBER},
                "required": ["file", "line"],
                "additionalProperties": False,
            },
        },
    },
}
_MAX_NEW_TOKENS = 400
_DRAFTERS = {"with the hint": "drafter_svc", "without": "benchmarks.simulated.unshaped"}


@dataclass(frozen=True)
class Kept:
    """Texts of one way.

    Attributes:
        way: see `_DRAFTERS`.
        texts: that were asked for.
        valid: that parse, and validate against their schema.
        tokens_per_round: emitted, without the prefill.
        acceptance: share of the drafted tokens that was kept.
    """

    way: str
    texts: int
    valid: int
    tokens_per_round: float
    acceptance: float


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """With all of its properties, and no other; without free white space."""
    own = {"x-guidance": {"whitespace_flexible": False}}
    if schema["type"] != "object":
        return schema | own
    return schema | own | {"required": list(schema["properties"]), "additionalProperties": False}


async def measure(way: str, address: str, options: argparse.Namespace) -> Kept:
    """All texts, so many at once."""
    names, at_once = list(SCHEMAS), asyncio.Semaphore(options.clients)
    valid = rounds = tokens = drafted = accepted = 0
    async with tandem.AsyncClient(address) as client:

        async def make(number: int) -> None:
            nonlocal valid, rounds, tokens, drafted, accepted
            schema = _closed(SCHEMAS[names[number % len(names)]])
            async with at_once:
                text = await client.generate(
                    f"{names[number % len(names)]} = ",
                    json_schema=schema,
                    seed=number,
                    gamma=options.gamma,
                    max_new_tokens=_MAX_NEW_TOKENS,
                )
            jsonschema.validate(json.loads(text.text), schema)
            valid += 1
            rounds += text.summary.rounds - 1
            tokens += text.summary.new_tokens - 1
            drafted += text.summary.drafted_tokens
            accepted += text.summary.accepted_tokens

        await asyncio.gather(*(make(number) for number in range(options.texts)))
    return Kept(way, options.texts, valid, tokens / rounds, accepted / drafted)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--clients", type=int, default=8, help="texts at once")
    parser.add_argument("--gamma", type=int, default=4)
    options = parser.parse_args()
    found = []
    for way, module in _DRAFTERS.items():
        with serving(Pair(max_length=1024), modules={"drafter": module}) as stack:
            found.append(asyncio.run(measure(way, stack.addresses["orchestrator"], options)))
    Console(width=110).print(table_of(map(asdict, found)))
    keep(RESULTS / "schemas.json", rows=[asdict(one) for one in found])


if __name__ == "__main__":
    main()
