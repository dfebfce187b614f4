"""OpenVINO GenAI: continuous batching, plain and with a draft model, or with prompt lookup.

Its folders are converted models. A pipeline with a draft model always drafts, so there are two.
With `--prefix-cache` texts share prefixes; with `--streamed` one text tells when its tokens come.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import Generate, Load, serve, timeline_of

_CACHE_GIB = 1
_SEQUENCES = 64
# Of lookups: the longest n-gram, as in the library's own example.
_NGRAM = 3
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class _Arrivals(genai.StreamerBase):  # type: ignore[misc]  # of another environment
    """When tokens came, and how many."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, int]] = []

    def write(self, token: int | list[int]) -> Any:
        """Some came."""
        self.found.append((time.monotonic(), len(token) if isinstance(token, list) else 1))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """No more will."""


class OpenVinoGenAI:
    """Both pipelines.

    Attributes:
        timelines: of the last text, for the protocol.

    Args:
        streamed: whether a single text is followed token by token.
        prefix_cache: whether texts share prefixes.
    """

    def __init__(self, streamed: bool = False, prefix_cache: bool = False) -> None:
        self._streamed = streamed
        self._prefix_cache = prefix_cache
        self.timelines: list[dict[str, Any]] = []

    def load(self, load: Load) -> dict[str, str]:
        """Compile them."""
        self._looks_up = not load.drafter
        hint = {"INFERENCE_PRECISION_HINT": _PRECISIONS[load.dtype]}
        self._pipelines: dict[bool, Any] = {}
        for drafts in sorted({gamma > 0 for gamma in load.gammas}):
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = _CACHE_GIB
            scheduler.max_num_seqs = _SEQUENCES
            scheduler.enable_prefix_caching = self._prefix_cache
            own: dict[str, Any] = dict(hint)
            if drafts and not load.drafter:
                own["prompt_lookup"] = True
            elif drafts:
                own["draft_model"] = genai.draft_model(load.drafter, "CPU", **hint)
            self._pipelines[drafts] = genai.ContinuousBatchingPipeline(
                load.target, scheduler, "CPU", own
            )
        return {name: version(name) for name in ("openvino-genai", "openvino")}

    def generate(self, generate: Generate) -> list[list[int]]:
        """All texts in one call."""
        prompts = [ov.Tensor(np.array([ids], np.int64)) for ids in generate.prompts]
        configs = [_config(generate, seed) for seed in generate.seeds]
        if generate.gamma and self._looks_up:
            for config in configs:
                config.max_ngram_size = _NGRAM
        pipeline = self._pipelines[generate.gamma > 0]
        if not self._streamed:
            found = pipeline.generate(prompts, configs)
        else:
            arrivals, asked_s = _Arrivals(), time.monotonic()
            found = pipeline.generate(prompts, configs, arrivals)
            self.timelines = [timeline_of(asked_s, arrivals.found)]
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
    serve(OpenVinoGenAI(*(option in sys.argv for option in ("--streamed", "--prefix-cache"))))
