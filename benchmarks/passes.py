"""What a pass takes by each back end, in turn: torch's and OpenVINO's.

    python -m benchmarks.passes MODEL --dtype bfloat16 [--out FILE]

For timing a model of a chosen shape, see `benchmarks.expand`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from tandem.inference.choice.choose import EngineName
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import SequenceCache

_SHAPES = ((1, 1), (1, 5), (1, 9), (1, 17), (16, 1), (16, 5))
_ENGINES: tuple[EngineName, ...] = ("torch", "openvino")
_CONTEXT = 200
_CAPACITY = _CONTEXT + 24


@dataclass(frozen=True)
class Row:
    """One shape of a batch.

    Attributes:
        texts: in it.
        rows: new tokens of each.
        torch_ms: median of torch's pass.
        openvino_ms: of OpenVINO's.
        torch_least_ms: shortest of torch's passes: what it takes where nobody disturbs it.
        openvino_least_ms: of OpenVINO's.
    """

    texts: int
    rows: int
    torch_ms: float
    openvino_ms: float
    torch_least_ms: float
    openvino_least_ms: float


def begun(decoder: Decoder, text: Sequence[int]) -> list[SequenceCache]:
    """Sixteen sequences with the same context."""
    caches = [decoder.reserve(_CAPACITY) for _ in range(16)]
    for cache in caches:
        assert cache is not None
        decoder.forward([Feed(cache, text[:_CONTEXT], 1)])
    return [cache for cache in caches if cache is not None]


def timed(run: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def measure(decoders: Sequence[Decoder], repeats: int) -> list[Row]:
    """All shapes, the back ends in turn."""
    text = [i * 37 % min(decoder.vocab_size for decoder in decoders) for i in range(_CAPACITY)]
    contexts = [begun(decoder, text) for decoder in decoders]
    found = []
    for texts, rows in _SHAPES:
        spent: list[list[float]] = [[] for _ in decoders]
        for _ in range(repeats + 3):
            for decoder, caches, times in zip(decoders, contexts, spent, strict=True):
                news = text[_CONTEXT : _CONTEXT + rows]
                feeds = [Feed(cache, news, rows) for cache in caches[:texts]]
                times.append(timed(lambda d=decoder, f=feeds: d.forward(f)))  # type: ignore[misc]
                for cache in caches[:texts]:
                    cache.rollback(_CONTEXT)
        medians = [median(times[3:]) for times in spent]
        found.append(Row(texts, rows, *medians, *(min(times[3:]) for times in spent)))
        print(
            f"{texts:3} x {rows:2} rows: torch {medians[0]:8.2f} ms, openvino {medians[1]:8.2f} ms,"
            f" {medians[0] / medians[1]:.2f} x;"
            f" least {found[-1].torch_least_ms:.2f}, {found[-1].openvino_least_ms:.2f} ms",
            flush=True,
        )
    return found


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    decoders = [
        Decoder.load(
            options.model, "cpu", options.dtype, 16 * 256, threads=options.threads, engine=engine
        )
        for engine in _ENGINES
    ]
    assert [decoder.engine for decoder in decoders] == list(_ENGINES)
    print(f"{options.model}, {options.dtype}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        rows = measure(decoders, options.repeats)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
