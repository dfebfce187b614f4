"""A decoder-only transformer, loaded once, that feeds tokens to caches."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tandem.errors import StartupError
from tandem.inference.cache import SequenceCache

# transformers patches its own classes while it loads, which two threads must not do at once.
_LOADING = threading.Lock()
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Decoder:
    """A causal language model and how often it was called.

    Attributes:
        name: the checkpoint's name, for people.
        vocab_size: rows of the logits.
        max_length: the most positions that the model was made for.
        forward_passes: model calls so far.
        fed_tokens: positions computed by them.
        forward_ns: time spent in them.
        tokenizer_fingerprint: of its token-to-id table; empty without a tokenizer.
    """

    def __init__(self, model: PreTrainedModel, name: str, tokenizer: Any = None) -> None:
        self._model = model.eval()
        self.name = name
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_length = int(getattr(config, "max_position_embeddings", 2**31 - 1))
        self.device = next(model.parameters()).device
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.parameters = sum(p.numel() for p in model.parameters())
        self.forward_passes = 0
        self.fed_tokens = 0
        self.forward_ns = 0
        self.tokenizer_fingerprint = _fingerprint(tokenizer)

    @classmethod
    def load(cls, model: str, device: str, dtype: str) -> Decoder:
        """Load a checkpoint from a directory or a hub id.

        Args:
            model: directory or hub id.
            device: as torch names it ("cpu", "cuda", "cuda:1").
            dtype: "auto" (float32 on a CPU, else the checkpoint's), or a name.

        Raises:
            StartupError: one sentence on what is missing or broken.
        """
        place = _device(device)
        disable_progress_bar()  # bars would tear the structured log
        if dtype == "auto":
            wanted: Any = torch.float32 if place.type == "cpu" else "auto"
        else:
            wanted = _DTYPES[dtype]
        try:
            config = AutoConfig.from_pretrained(model)
            with _LOADING:
                loaded, report = AutoModelForCausalLM.from_pretrained(
                    model, config=config, dtype=wanted, output_loading_info=True
                )
            loaded = loaded.to(place)
        except Exception as error:  # transformers raises whatever its readers raise
            first_line = str(error).strip().split("\n")[0]
            raise StartupError(
                f"cannot load the model {model!r}: {type(error).__name__}: {first_line}"
            ) from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise StartupError(f"the model {model!r} lacks weights: {missing}")
        decoder = cls(loaded, Path(model).name, _tokenizer(model))
        decoder._warm_up()
        return decoder

    def _warm_up(self) -> None:
        with torch.inference_mode():
            logits = self.forward(SequenceCache(2), [0, 0], 2)
        if not bool(logits.isfinite().all()):
            raise StartupError(f"the model {self.name!r} computes logits that are not finite")
        self.forward_passes = self.fed_tokens = self.forward_ns = 0

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a text, of the generation config or else the model's."""
        for config in (self._model.generation_config, self._model.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return sorted({eos} if isinstance(eos, int) else set(eos))
        return []

    def forward(self, cache: SequenceCache, token_ids: Sequence[int], last: int) -> Tensor:
        """Feed new tokens behind what the cache holds.

        Args:
            cache: grows by len(token_ids).
            token_ids: at least one.
            last: rows wanted, of the last tokens.

        Returns:
            [last, V] logits in the model's dtype.
        """
        started = time.perf_counter_ns()
        tokens = torch.tensor([list(token_ids)], device=self.device)
        output = self._model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=last
        )
        self.forward_passes += 1
        self.fed_tokens += len(token_ids)
        self.forward_ns += time.perf_counter_ns() - started
        logits: Tensor = output.logits[0, -last:]
        return logits

    def tokenizer_json(self) -> bytes:
        """The serialised fast tokenizer; empty where the checkpoint has none."""
        if self.tokenizer is None:
            return b""
        return bytes(self.tokenizer.backend_tokenizer.to_str(), "utf-8")

    def chat_template(self) -> str:
        """The checkpoint's Jinja template; empty where it has none."""
        template = getattr(self.tokenizer, "chat_template", None)
        return template if isinstance(template, str) else ""


def _fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the token-to-id table: the part on which a pair has to agree."""
    if tokenizer is None:
        return ""
    table = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise StartupError(f"cannot use the device {name!r}: {first_line}") from error
    return device


def _tokenizer(model: str) -> Any:
    """The checkpoint's fast tokenizer, or None where it has no tokenizer at all."""
    if Path(model).is_dir() and not list(Path(model).glob("tokenizer*")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        raise StartupError(f"cannot load the tokenizer of {model!r}: {first_line}") from error
    if not tokenizer.is_fast:
        raise StartupError(f"the tokenizer of {model!r} has no fast (Rust) version to hand out")
    return tokenizer
