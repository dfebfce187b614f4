"""OpenVINO GenAI: continuous batching, plain and with a draft model.

Its folders are converted models. A pipeline with a draft model always drafts, so there are two.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import Generate, Load, serve

_CACHE_GIB = 1
_SEQUENCES = 64
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoGenAI:
    """Both pipelines."""

    def load(self, load: Load) -> dict[str, str]:
        """Compile them."""
        hint = {"INFERENCE_PRECISION_HINT": _PRECISIONS[load.dtype]}
        self._pipelines: dict[bool, Any] = {}
        for drafts in sorted({gamma > 0 for gamma in load.gammas}):
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = _CACHE_GIB
            scheduler.max_num_seqs = _SEQUENCES
            scheduler.enable_prefix_caching = False
            own: dict[str, Any] = dict(hint)
            if drafts:
                own["draft_model"] = genai.draft_model(load.drafter, "CPU", **hint)
            self._pipelines[drafts] = genai.ContinuousBatchingPipeline(
                load.target, scheduler, "CPU", own
            )
        return {name: version(name) for name in ("openvino-genai", "openvino")}

    def generate(self, generate: Generate) -> list[list[int]]:
        """All texts in one call."""
        prompts = [ov.Tensor(np.array([ids], np.int64)) for ids in generate.prompts]
        configs = [_config(generate, seed) for seed in generate.seeds]
        found = self._pipelines[generate.gamma > 0].generate(prompts, configs)
        return [list(text.m_generation_ids[0]) for text in found]

    def close(self) -> None:
        """Nothing outlives the process."""


def _config(generate: Generate, seed: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = generate.new_tokens
    config.ignore_eos = True
    config.do_sample = generate.temperature > 0
    if generate.temperature:
        config.temperature = generate.temperature
        config.top_p = 1.0
        config.top_k = 2**31 - 1
        config.rng_seed = seed
    if generate.gamma:
        config.num_assistant_tokens = generate.gamma
    return config


if __name__ == "__main__":
    serve(OpenVinoGenAI())
