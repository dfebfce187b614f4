"""A decoder-only transformer, loaded once, that takes ragged batches of many sequences."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tandem.errors import StartupError, first_line
from tandem.inference.choice import EngineName, choose_backend
from tandem.inference.compatibility import check_support, max_positions
from tandem.inference.extents import SequenceCache
from tandem.inference.feed import Feed
from tandem.inference.memory import cache_size
from tandem.inference.threads import use_threads

# transformers patches its own classes while it loads, which two threads must not do at once.
_LOADING = threading.Lock()
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Decoder:
    """A causal language model, its KV pool, and how often it was called.

    Attributes:
        name: the checkpoint's name, for people.
        vocab_size: rows of the logits.
        max_length: the most positions that the model was made for.
        pool: the KV cache of all sequences, of the kind that the back end fills.
        forward_passes: model calls so far.
        fed_tokens: positions computed by them.
        tokenizer_fingerprint: of its token-to-id table; empty without a tokenizer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        tokenizer: Any = None,
        *,
        cache_tokens: int = 0,
        at_most: int = 4096,
        engine: EngineName = "torch",
    ) -> None:
        self._model = model.eval()
        self.name = name
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_length = max_positions(config)
        self.device = next(model.parameters()).device
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.parameters = sum(p.numel() for p in model.parameters())
        self.forward_passes = 0
        self.fed_tokens = 0
        self.tokenizer_fingerprint = _fingerprint(tokenizer)
        self._start(cache_tokens, at_most, engine)

    @classmethod
    def load(
        cls,
        model: str,
        device: str,
        dtype: str,
        cache_tokens: int = 0,
        *,
        at_most: int = 4096,
        threads: int | None = None,
        engine: EngineName = "torch",
    ) -> Decoder:
        """Load a checkpoint from a directory or a hub id.

        Args:
            model: directory or hub id.
            device: as torch names it ("cpu", "cuda", "cuda:1").
            dtype: "auto" (float32 on a CPU, else the checkpoint's), or a name.
            cache_tokens: positions that all sequences may hold together; 0 takes `at_most`,
                or what fits into half of the free memory.
            at_most: see there.
            threads: of this process, as the settings have them; None leaves them alone.
            engine: what computes the pass; see `choose_backend`.

        Raises:
            StartupError: one sentence on what is missing, broken or too large.
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
            raise StartupError(
                f"cannot load the model {model!r}: {type(error).__name__}: {first_line(error)}"
            ) from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise StartupError(f"the model {model!r} lacks weights: {missing}")
        if threads is not None:  # before the layout is chosen
            use_threads(threads, loaded.num_parameters())
        return cls(
            loaded,
            Path(model).name,
            _tokenizer(model),
            cache_tokens=cache_tokens,
            at_most=at_most,
            engine=engine,
        )

    def _start(self, cache_tokens: int, at_most: int, engine: EngineName) -> None:
        """Check that the model can be served, choose what computes it, and make the pool."""
        check_support(self._model)
        with torch.inference_mode():
            self._backend = choose_backend(self._model, engine)
            pool = self._backend.pool
            positions = cache_size(self.device, pool.bytes_per_position, cache_tokens, at_most)
            try:
                self.pool = self._backend.pool = pool.resized(positions)
            except (RuntimeError, MemoryError) as error:
                raise StartupError(
                    f"cannot allocate a KV cache of {positions} tokens: {first_line(error)}"
                ) from error

    @property
    def engine(self) -> str:
        """What computes the pass: "torch" or "openvino"."""
        return self._backend.name

    def reserve(self, capacity: int) -> SequenceCache | None:
        """Room for a sequence of up to `capacity` positions; None where there is none now."""
        cache: SequenceCache | None = self.pool.reserve(capacity)
        return cache

    def release(self, cache: SequenceCache) -> None:
        """Give a sequence's room back. It must not be in a batch any more."""
        self.pool.release(cache)

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a text, of the generation config or else the model's."""
        for config in (self._model.generation_config, self._model.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return sorted({eos} if isinstance(eos, int) else set(eos))
        return []

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Feed new tokens of several sequences in one pass.

        Args:
            feeds: of different sequences, at least one; their caches grow.

        Returns:
            [R, V] logits in the back end's dtype: the rows asked for, feed by feed.
        """
        logits = self._backend.forward(feeds)
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
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
        raise StartupError(f"cannot use the device {name!r}: {first_line(error)}") from error
    return device


def _tokenizer(model: str) -> Any:
    """The checkpoint's fast tokenizer, or None where it has no tokenizer at all."""
    if Path(model).is_dir() and not list(Path(model).glob("tokenizer*")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:
        raise StartupError(
            f"cannot load the tokenizer of {model!r}: {first_line(error)}"
        ) from error
    if not tokenizer.is_fast:
        raise StartupError(f"the tokenizer of {model!r} has no fast (Rust) version to hand out")
    return tokenizer
