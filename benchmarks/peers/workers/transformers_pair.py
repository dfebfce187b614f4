"""transformers: `generate` on a batch, and assisted generation, which takes one text at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.peers.protocol import Generate, Load, serve
from tandem.tools.load.timeline import Timeline

_PAD = 0
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
    """The pair; the drafter is in float32, which is faster for its small matrices.

    The target has the faster dtype, the same for all draft lengths, so that its law is the same.

    Attributes:
        timelines: of the last texts, for the protocol; empty for a batch, which is not streamed.
    """

    def __init__(self) -> None:
        self.timelines: list[dict[str, Any]] = []

    def load(self, load: Load) -> dict[str, str]:
        """Load both."""
        disable_progress_bar()
        set_verbosity_error()
        self._drafter = _loaded(load.drafter, "float32")
        targets = {dtype: _loaded(load.target, dtype) for dtype in (load.dtype, "float32")}
        dtype = self._fastest(targets, load.gammas)
        self._target = targets[dtype]
        return {name: version(name) for name in ("transformers", "torch")} | {"dtype": dtype}

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
        config = self._drafter.generation_config
        config.num_assistant_tokens = generate.gamma
        config.num_assistant_tokens_schedule = "constant"
        own = generate.rule == _DEFAULTS
        config.assistant_confidence_threshold = _DEFAULT_CONFIDENCE if own else 0.0
        return [self._batch([ids], generate)[0] for ids in generate.prompts]

    def _batch(self, prompts: Sequence[Sequence[int]], generate: Generate) -> list[list[int]]:
        sampling: dict[str, Any] = {"do_sample": False}
        if generate.temperature:
            sampling = {"do_sample": True, "temperature": generate.temperature}
            sampling |= {"top_k": 0, "top_p": 1.0}
        longest = max(map(len, prompts))
        padding = [longest - len(ids) for ids in prompts]
        padded = [[_PAD] * n + list(ids) for n, ids in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        arrivals = _Arrivals() if len(prompts) == 1 else None
        started = time.perf_counter()
        found: Any = self._target.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=generate.new_tokens,
            assistant_model=self._drafter if generate.gamma else None,
            streamer=arrivals,
            **sampling,
        )
        if arrivals is not None:
            timeline = Timeline(started, started, tuple(arrivals.times), time.perf_counter())
            self.timelines.append(timeline.as_json())
        texts: list[list[int]] = found[:, longest:].tolist()
        return texts

    def close(self) -> None:
        """Nothing outlives the process."""


def _loaded(folder: str, dtype: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = _PAD
    return model


if __name__ == "__main__":
    serve(TransformersPair())
