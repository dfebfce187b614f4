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
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.peers.protocol import Generate, Load, serve

_PAD = 0
# Texts that a target's dtype is chosen by, for each draft length and in turn with the other's.
_TRIALS = 5
_TRIAL = Generate(((1, 2, 3, 4),), (0,), 0, 1.0, 24)


class TransformersPair:
    """The pair; the drafter in float32, which is the faster one for its small matrices.

    The target's dtype is the faster one, alike for all draft lengths: its law is one.
    """

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
        """The dtype whose texts take least, over all draft lengths and after a first text."""
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
        """One batch; with drafts, one after the other."""
        torch.manual_seed(generate.seeds[0])
        if not generate.gamma:
            return self._batch(generate.prompts, generate)
        config = self._drafter.generation_config
        config.num_assistant_tokens = generate.gamma
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
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
        found: Any = self._target.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=generate.new_tokens,
            assistant_model=self._drafter if generate.gamma else None,
            **sampling,
        )
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
