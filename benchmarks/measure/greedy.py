"""How far the greedy texts of a small model go until they repeat themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.measure.prompts import PROMPTS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb

# So many tokens in a row, for the so-manyth time, are a loop.
LENGTH, TIMES = 8, 3


def before_loop(tokens: Sequence[int]) -> int:
    """How many tokens there are up to where a row of `LENGTH` has come `TIMES` times."""
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(LENGTH, len(tokens) + 1):
        row = tuple(tokens[end - LENGTH : end])
        seen[row] += 1
        if seen[row] == TIMES:
            return end
    return len(tokens)


def greedy_lengths(stub: Any, most: int) -> list[int]:
    """How long each prompt's text at temperature 0 is, which is the same by every method.

    Args:
        stub: of an orchestrator.
        most: tokens of a text that does not loop.
    """
    lengths = []
    for prompt in PROMPTS:
        message = pb.Generation(
            prompt=prompt,
            stopping=pb.Stopping(max_new_tokens=most, ignore_eos=True),
            speculation=pb.Speculation(gamma=0),
        )
        answer = stub.Complete(pb.CompleteRequest(generation=message), timeout=300)
        lengths.append(before_loop(answer.token_ids))
    return lengths
