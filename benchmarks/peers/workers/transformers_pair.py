"""transformers: `generate` on a batch, and assisted generation, which takes one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.peers.protocol import Generate, Load, serve

_PAD = 0


class TransformersPair:
    """The pair; the drafter in float32, which is the faster one for its small matrices."""

    def load(self, load: Load) -> dict[str, str]:
        """Load both."""
        disable_progress_bar()
        set_verbosity_error()
        self._target, self._drafter = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            for folder, dtype in ((load.target, load.dtype), (load.drafter, "float32"))
        )
        for model in (self._target, self._drafter):
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = _PAD
        return {name: version(name) for name in ("transformers", "torch")}

    @torch.inference_mode()
    def generate(self, generate: Generate) -> list[list[int]]:
        """One batch; with drafts, one after the other."""
        torch.manual_seed(generate.seeds[0])
        if not generate.gamma:
            return self._batch(generate.prompts, generate, None)
        config = self._drafter.generation_config
        config.num_assistant_tokens = generate.gamma
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return [self._batch([ids], generate, self._drafter)[0] for ids in generate.prompts]

    def _batch(
        self, prompts: Sequence[Sequence[int]], generate: Generate, assistant: Any
    ) -> list[list[int]]:
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
            assistant_model=assistant,
            **sampling,
        )
        texts: list[list[int]] = found[:, longest:].tolist()
        return texts

    def close(self) -> None:
        """Nothing outlives the process."""


if __name__ == "__main__":
    serve(TransformersPair())
