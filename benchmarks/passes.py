"""What a pass takes by each back end, beside the same model as OpenVINO's own tools export it.

    python -m benchmarks.passes [--model target] [--dtype float32 bfloat16] [--turns 5]

Texts have a context of 200 tokens, and as many rows each as the column says (texts x rows). All
take their passes in turn. `exported` is the conversion by optimum-intel, in 16 bits, with paged
attention; it runs in this process, by the same runtime and with the same threads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino._offline_transformations import paged_attention_transformation
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.measure.environment import RESULTS, keep, result_file
from benchmarks.measure.tables import table_of
from benchmarks.peers.installation import OPENVINO, checkpoints, converted, install
from benchmarks.peers.plan import FULL
from tandem.inference.check.texts import ordinary_tokens
from tandem.inference.choice.candidates import by_openvino, by_torch
from tandem.inference.choice.record import StartRecord
from tandem.inference.feed import Feed
from tandem.inference.passes.backend import Backend

_BLOCK, _CONTEXT, _TEXTS = 32, 200, 16
_SHAPES = ((1, 1), (1, 5), (1, 9), (1, 17), (4, 1), (4, 5), (16, 1), (16, 5), (16, 9))
# Of a turn: the first passes of a shape are slower.
_WARM_UP, _TIMED = 2, 5
# Runs a pass of as many texts with as many rows each.
Run = Callable[[int, int], None]


def ours(backend: Backend) -> Run:
    """Passes of a back end of ours."""
    backend.pool = backend.pool.resized(_TEXTS * (_CONTEXT + 2 * _BLOCK))
    caches = [backend.pool.reserve(_CONTEXT + _BLOCK) for _ in range(_TEXTS)]
    for cache in caches:
        backend.forward([Feed(cache, ordinary_tokens(backend.vocab_size, _CONTEXT), 0)])

    def run(texts: int, rows: int) -> None:
        tokens = ordinary_tokens(backend.vocab_size, rows)
        backend.forward([Feed(cache, tokens, rows) for cache in caches[:texts]])
        for cache in caches[:texts]:
            cache.rollback(_CONTEXT)

    return run


def exported(folder: Path, dtype: str, threads: int) -> Run:
    """Passes of an exported model, over blocks that are ours."""
    core = ov.Core()
    model = core.read_model(folder / "openvino_model.xml")
    paged_attention_transformation(model)
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    precision = ov.Type.bf16 if dtype == "bfloat16" else ov.Type.f32
    caches = [port for port in model.inputs if "_cache." in port.any_name]
    for port in caches:
        port.get_node().set_partial_shape(ov.PartialShape([-1, heads, _BLOCK, width]))
        port.get_node().set_element_type(precision)
    model.validate_nodes_and_infer_types()
    name = precision.to_string()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": name,
        "KV_CACHE_PRECISION": name,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    each = -(-(_CONTEXT + _BLOCK) // _BLOCK)
    for port in caches:
        tensor = ov.Tensor(precision, [_TEXTS * each, heads, _BLOCK, width])
        request.set_tensor(port.any_name, tensor)

    def run(texts: int, rows: int, past: int = _CONTEXT) -> None:
        blocks = -(-(past + rows) // _BLOCK)
        numbers: dict[str, tuple[Any, type]] = {
            "input_ids": (ordinary_tokens(config["vocab_size"], rows) * texts, np.int64),
            "position_ids": (list(range(past, past + rows)) * texts, np.int64),
            "past_lens": ([past] * texts, np.int32),
            "subsequence_begins": (range(0, rows * texts + 1, rows), np.int32),
            "block_indices": (
                [text * each + block for text in range(texts) for block in range(blocks)],
                np.int32,
            ),
            "block_indices_begins": (range(0, blocks * texts + 1, blocks), np.int32),
            "max_context_len": (past + rows, np.int32),
        }
        for key, (value, kind) in numbers.items():
            request.set_tensor(key, ov.Tensor(np.array(value, kind)))
        request.infer(share_outputs=True)

    run(_TEXTS, _CONTEXT, 0)
    return run


def timed(runs: Sequence[Run], texts: int, rows: int) -> list[float]:
    """Milliseconds of a pass by each, in one turn."""
    found = []
    for run in runs:
        times = []
        for _ in range(_WARM_UP + _TIMED):
            started = time.perf_counter()
            run(texts, rows)
            times.append(1e3 * (time.perf_counter() - started))
        found.append(median(times[_WARM_UP:]))
    return found


@torch.inference_mode()
def measure(model: str, folder: Path, dtype: str, turns: int) -> list[dict[str, object]]:
    """A row for each back end, and one for the ratio of OpenVINO's to the exported model."""

    def loaded() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    threads = torch.get_num_threads()
    first = loaded()
    by_runtime = by_openvino(first, StartRecord(first, threads, "benchmark"))
    if by_runtime is None:
        raise SystemExit("OpenVINO cannot compute this model")
    runs = {
        "OpenVINO, ours": ours(by_runtime),
        "torch, ours": ours(by_torch(loaded())),
        "OpenVINO, exported": exported(folder, dtype, threads),
    }
    rows: dict[str, dict[str, object]] = {name: {"pass, ms": name} for name in runs}
    ratios: dict[str, object] = {"pass, ms": "ours / exported"}
    for texts, count in _SHAPES:
        found = [timed(list(runs.values()), texts, count) for _ in range(turns)]
        for own, times in zip(rows.values(), zip(*found, strict=True), strict=True):
            own[f"{texts}x{count}"] = median(times)
        each = [turn[0] / turn[2] for turn in found]
        ratios[f"{texts}x{count}"] = f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
    return [*rows.values(), ratios]


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=["target", "drafter"], default="target")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=result_file, default=RESULTS / "passes.json")
    options = parser.parse_args()
    console = Console(width=180)
    install(OPENVINO, FULL.setup_s, console.print)
    folders = checkpoints(FULL, console.print)
    own = Path(converted(folders, console.print)[options.model])
    found = {}
    for dtype in options.dtype:
        found[dtype] = measure(folders[options.model], own, dtype, options.turns)
        console.print(table_of(found[dtype], dtype))
    keep(options.out, model=options.model, context=_CONTEXT, passes=found)


if __name__ == "__main__":
    main()
