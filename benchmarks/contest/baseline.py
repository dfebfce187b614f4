"""What a user would pick instead: transformers, with and without an assistant model."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import BaseStreamer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.contest.method import dtypes_of
from tandem.tools.load.timeline import Timeline

# The assistant's defaults in transformers 5: up to 20 tokens, fewer where one is less likely
# than this.
_DEFAULT_TOKENS = 20
_DEFAULT_CONFIDENCE = 0.4


class _Arrivals(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens come; the first call hands the prompt back."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append((time.perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is buffered."""


class Baseline:
    """A pair loaded by transformers.

    Args:
        drafter: folder of its checkpoint.
        target: folder of its checkpoint.
        dtype: one of `method.DTYPES`.
    """

    def __init__(self, drafter: str, target: str, dtype: str) -> None:
        disable_progress_bar()
        set_verbosity_error()  # it calls its own assisted generation deprecated, text by text
        self._tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self._target, self._drafter = (
            AutoModelForCausalLM.from_pretrained(model, dtype=each)
            for model, each in zip((target, drafter), dtypes_of(dtype), strict=True)
        )
        for model in (self._drafter, self._target):
            # Every text goes on to its full length.
            model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def text(
        self, prompt: str, temperature: float, seed: int, new_tokens: int, gamma: int | None
    ) -> Timeline:
        """One text.

        Args:
            prompt: to continue.
            temperature: 0 takes the likeliest token.
            seed: of the draws.
            new_tokens: exactly as many.
            gamma: drafted tokens; 0 for plain generation, None for the assistant's defaults.
        """
        arrivals = _Arrivals()
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        started = time.perf_counter()
        tokens = self._tokenizer(prompt, return_tensors="pt")
        self._target.generate(
            **tokens,
            **sampling,
            max_new_tokens=new_tokens,
            streamer=arrivals,
            assistant_model=None if gamma == 0 else self._assistant(gamma),
        )
        return Timeline(started, started, tuple(arrivals.times), time.perf_counter())

    def _assistant(self, gamma: int | None) -> Any:
        config = self._drafter.generation_config
        config.num_assistant_tokens = _DEFAULT_TOKENS if gamma is None else gamma
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = _DEFAULT_CONFIDENCE if gamma is None else 0.0
        return self._drafter
