"""transformers: `generate` on a batch, and assisted generation, which takes one text at a time.

With `--compiled`, on a GPU, its passes without drafts are compiled and captured as CUDA graphs.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.measure.environment import versions
from benchmarks.peers.protocol import Generate, Load, serve
from tandem.tools.load.timeline import Timeline

_PAD = 0
# Of compiled passes, which have one shape: a prompt's tokens, and those after it.
_COMPILED_PROMPT, _COMPILED_TOKENS = 32, 128
# Texts per draft length and dtype by which the target's dtype is chosen.
_TRIALS = 5
_TRIAL = Generate(((1, 2, 3, 4),), (0,), 0, 1.0, 24)
# This rule is assisted generation with the defaults of transformers 5: it stops drafting at a token
# that is less likely than this.
_DEFAULTS, _DEFAULT_CONFIDENCE = "defaults", 0.4


class _Arrivals(BaseStreamer):  # type: ignore[misc]
    """Records when the tokens of one text arrive; the first call contains the prompt."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append((time.perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is buffered."""


class TransformersPair:
    """The pair. On a CPU the drafter is in float32, which is faster for its small matrices.

    The target has the faster dtype, the same for all draft lengths, so that its law is the same. On
    a GPU both have the dtype that is asked for.

    Attributes:
        timelines: of the last texts, for the protocol; empty for a batch, which is not streamed.

    Args:
        compiled: whether passes without drafts are compiled, which needs a GPU.
    """

    def __init__(self, compiled: bool = False) -> None:
        self._compiled = compiled
        self._compiled_for: set[int] = set()
        self.timelines: list[dict[str, Any]] = []

    def load(self, load: Load) -> dict[str, str]:
        """Load both."""
        disable_progress_bar()
        set_verbosity_error()
        self._device, cpu = load.device, load.device == "cpu"
        dtypes = {load.dtype, "float32"} if cpu else {load.dtype}
        own = "float32" if cpu else load.dtype
        self._drafter = _loaded(load.drafter, own, load.device) if load.drafter else None
        targets = {dtype: _loaded(load.target, dtype, load.device) for dtype in sorted(dtypes)}
        dtype = self._fastest(targets, load.gammas) if cpu else load.dtype
        self._target = targets[dtype]
        return versions("transformers", "torch") | {"dtype": dtype}

    def _fastest(self, targets: dict[str, Any], gammas: Sequence[int]) -> str:
        """The dtype whose texts take the least time, over all draft lengths and after a warm-up."""
        logs: dict[str, float] = dict.fromkeys(targets, 0.0)
        for gamma in gammas:
            spent: dict[str, list[float]] = {dtype: [] for dtype in targets}
            for _ in range(1 + _TRIALS):
                for dtype, self._target in targets.items():
                    started = time.perf_counter()
                    self.generate(replace(_TRIAL, gamma=gamma))
                    spent[dtype].append(time.perf_counter() - started)
            for dtype, seconds in spent.items():
                logs[dtype] += math.log(median(seconds[1:]))
        return min(logs, key=lambda dtype: logs[dtype])

    @torch.inference_mode()
    def generate(self, generate: Generate) -> list[list[int]]:
        """All texts in one batch; with drafts, one text after the other."""
        torch.manual_seed(generate.seeds[0])
        self.timelines = []
        if not generate.gamma:
            return self._batch(generate.prompts, generate)
        if self._drafter is None:
            return [self._batch([ids], generate)[0] for ids in generate.prompts]
        config = self._drafter.generation_config
        config.num_assistant_tokens = generate.gamma
        config.num_assistant_tokens_schedule = "constant"
        own = generate.rule == _DEFAULTS
        config.assistant_confidence_threshold = _DEFAULT_CONFIDENCE if own else 0.0
        return [self._batch([ids], generate)[0] for ids in generate.prompts]

    def _batch(self, prompts: Sequence[Sequence[int]], generate: Generate) -> list[list[int]]:
        longest, new_tokens = max(map(len, prompts)), generate.new_tokens
        cache: dict[str, Any] = {}
        if self._compiled and len(prompts) not in self._compiled_for:
            # Compiled once for the length that all later texts have.
            self._compiled_for.add(len(prompts))
            new_tokens = max(new_tokens, _COMPILED_TOKENS)
        if self._compiled:
            cache, longest = {"cache_implementation": "static"}, max(longest, _COMPILED_PROMPT)
        sampling: dict[str, Any] = {"do_sample": False}
        if generate.gamma and self._drafter is None:
            cache["prompt_lookup_num_tokens"] = generate.gamma
        if generate.temperature:
            sampling = {"do_sample": True, "temperature": generate.temperature}
            sampling |= {"top_k": 0, "top_p": 1.0}
        padding = [longest - len(ids) for ids in prompts]
        padded = [[_PAD] * n + list(ids) for n, ids in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        arrivals = _Arrivals() if len(prompts) == 1 else None
        started = time.perf_counter()
        found: Any = self._target.generate(
            input_ids=torch.tensor(padded, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            max_new_tokens=new_tokens,
            assistant_model=self._drafter if generate.gamma else None,
            streamer=arrivals,
            **sampling,
            **cache,
        )
        if arrivals is not None:
            timeline = Timeline(started, started, tuple(arrivals.times), time.perf_counter())
            self.timelines.append(timeline.as_json())
        texts: list[list[int]] = found[:, longest:].tolist()
        return texts

    def close(self) -> None:
        """Nothing outlives the process."""


def _loaded(folder: str, dtype: str, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = _PAD
    return model


if __name__ == "__main__":
    serve(TransformersPair("--compiled" in sys.argv))
