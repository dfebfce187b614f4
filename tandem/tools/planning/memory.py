"""What a text's length costs: memory of the KV cache, from a checkpoint's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import first_line
from tandem.failure import Misconfigured
from tandem.tools.local.pair import located

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TextMemory:
    """The KV cache of texts.

    Attributes:
        model: name of the checkpoint.
        dtype: of the cache.
        longest: tokens that the model can hold; 0 where its configuration does not say it.
        bytes_a_token: in all layers, keys and values.
    """

    model: str
    dtype: str
    longest: int
    bytes_a_token: int


def memory_of(model: str, dtype: str | None = None) -> TextMemory:
    """What a model's texts take.

    Args:
        model: directory or hub id.
        dtype: of the service; None is the checkpoint's, as on a GPU.

    Raises:
        Misconfigured: its configuration cannot be read, or does not say what a token takes.
    """
    from transformers import AutoConfig

    folder = located("plan", model)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = f"cannot read the configuration of {model}: {first_line(error)}"
        raise Misconfigured(reason) from error
    config = config.get_text_config()
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        numbers = 2 * config.num_hidden_layers * heads * size
    except AttributeError as error:
        raise Misconfigured(
            f"the configuration of {model} does not say what a token takes: {first_line(error)}"
        ) from error
    stored = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if stored not in _BYTES:
        raise Misconfigured(f"--dtype must be one of {', '.join(_BYTES)}, got {stored}")
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    return TextMemory(Path(model).name, stored, longest, numbers * _BYTES[stored])
