"""Rows of p and q on the target's own texts, recorded in this process.

An expanded model has the same rows as its source, so the embedded models are recorded unexpanded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar


@dataclass(frozen=True)
class Texts:
    """Samples of the target at temperature 1 that continue one prompt.

    Attributes:
        tokens: [S, L], the prompt included.
        prompt: its length.
    """

    tokens: Tensor
    prompt: int


@dataclass(frozen=True)
class Rounds:
    """Drafts that continue texts of the target, with both models' rows.

    Attributes:
        tokens: [S, G] drafted from q.
        q: [S, G, V].
        p: [S, G+1, V].
    """

    tokens: Tensor
    q: Tensor
    p: Tensor


class Recorder:
    """The pair in float32, run by transformers itself.

    Args:
        drafter: folder of its checkpoint.
        target: folder of its checkpoint.
        seed: of all draws.
    """

    def __init__(self, drafter: str, target: str, seed: int = 0) -> None:
        disable_progress_bar()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self._drafter, self._target = self.load(drafter), self.load(target)
        self._generator = torch.Generator().manual_seed(seed)

    @staticmethod
    def load(model: str) -> Any:
        """A model in float32, from the folder of its checkpoint."""
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.inference_mode()
    def texts(
        self, prompts: Sequence[str], samples: int, length: int, progress: Progress
    ) -> Iterator[Texts]:
        """Sample the target.

        Args:
            prompts: each gives one batch.
            samples: of each prompt.
            length: new tokens of each sample.
            progress: gets a bar.
        """
        for prompt in progress.track(prompts, description="recorded rows"):
            ids = self._tokenizer(prompt, return_tensors="pt").input_ids
            context = ids.expand(samples, -1)
            drawn, _ = self._continue(self._target, context, length)
            yield Texts(torch.cat((context, drawn), 1), ids.shape[1])

    @torch.inference_mode()
    def rounds(self, contexts: Tensor, gamma: int) -> Rounds:
        """One round after each context.

        Args:
            contexts: [S, L] tokens.
            gamma: draft length.
        """
        tokens, q = self._continue(self._drafter, contexts, gamma)
        whole = torch.cat((contexts, tokens), 1)
        logits = self._target(whole, logits_to_keep=gamma + 1).logits
        return Rounds(tokens, q, logits.softmax(-1))

    @torch.inference_mode()
    def rows(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """p and q [N, V] at every sampled position of texts."""
        start = texts.prompt - 1
        p, q = (
            model(texts.tokens).logits[:, start:-1].softmax(-1).flatten(0, 1)
            for model in (self._target, self._drafter)
        )
        return p, q

    def _continue(self, model: Any, context: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Tokens [S, length] drawn at temperature 1, and their rows [S, length, V]."""
        tokens, rows = [], []
        cache, fed = None, context
        for _ in range(length):
            output = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            rows.append(output.logits[:, -1].softmax(-1))
            fed = torch.multinomial(rows[-1], 1, generator=self._generator)
            tokens.append(fed)
        return torch.cat(tokens, 1), torch.stack(rows, 1)
