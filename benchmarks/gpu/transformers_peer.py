"""Texts by `transformers`, compiled with a static cache: the peer that takes no drafts.

    python -m benchmarks.gpu.transformers_peer --out DIR [--fake]

It compiles while the models are started beside, writes DIR/peer.ready, and measures one greedy text
when there is DIR/peer.go; DIR/peer.json has its ms a token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import pair
from benchmarks.gpu.shapes import Shapes, fake, real

_TURNS, _POLL_SECONDS, _PROMPT = 3, 0.05, 64
# More would take cores from what is started beside.
_THREADS = 4


class Arrivals:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Tokens: first the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """The text is whole."""


@torch.inference_mode()
def text(model: Any, shapes: Shapes, tokens: int) -> float:
    """One greedy text; its ms a token, without the first one."""
    arrivals = Arrivals()
    prompt = torch.tensor([pair.tokens(_PROMPT, shapes)], device=shapes.device)
    model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        streamer=arrivals,
        # With it `generate` compiles the decoding on a device, and captures it.
        cache_implementation="static" if shapes.real else None,
    )
    first, *later = arrivals.times[1:]
    return 1e3 * (later[-1] - first) / len(later)


def main() -> None:
    """Get ready, wait, measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fake", action="store_true")
    options = parser.parse_args()
    shapes = fake() if options.fake else real()
    torch.set_num_threads(_THREADS)
    model: Any = pair.made("target", shapes)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tokens = shapes.new_tokens
    began = time.perf_counter()
    for _ in range(2):
        text(model, shapes, tokens)
    ready = time.perf_counter() - began
    (options.out / "peer.ready").touch()
    while not (options.out / "peer.go").exists():
        time.sleep(_POLL_SECONDS)
    times = [text(model, shapes, tokens) for _ in range(_TURNS)]
    found = {"ms_a_token": median(times), "all_ms": times, "compiling_s": ready}
    part = options.out / "peer.part"
    part.write_text(json.dumps(found))
    part.replace(options.out / "peer.json")


if __name__ == "__main__":
    main()
