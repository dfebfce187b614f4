"""What a text's length costs: memory of the KV cache, from a checkpoint's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import first_line
from tandem.failure import Misconfigured

# Of GPT-2 and its kind.
_NAMES = {
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
}
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
    """What a model's texts take, by its config.json: no library of models is loaded.

    Args:
        model: directory of the checkpoint.
        dtype: of the service; None is the checkpoint's, which `auto` is on a GPU. On a CPU `auto`
            is float32.

    Raises:
        Misconfigured: its configuration cannot be read, or does not say what a token takes.
    """
    file = Path(model).expanduser() / "config.json"
    try:
        found: Any = json.loads(file.read_text("utf-8"))
        # Of a model with other parts, that of its texts.
        config = {**found, **found.get("text_config", {})}
        config = {_NAMES.get(name, name): value for name, value in config.items()}
    except OSError:
        raise Misconfigured(f"cannot read {file}: --model takes a checkpoint's directory") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise Misconfigured(f"{file} is no configuration: {first_line(error)}") from error
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        # One number for all layers, or one for each.
        all_heads = sum(heads) if isinstance(heads, list) else config["num_hidden_layers"] * heads
    except KeyError as error:
        raise Misconfigured(f"{file} does not say what a token takes: it has no {error}") from error
    stored = dtype or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if stored not in _BYTES:
        raise Misconfigured(f"--dtype must be one of {', '.join(_BYTES)}, got {stored}")
    longest = int(config.get("max_position_embeddings") or 0)
    return TextMemory(Path(model).name, stored, longest, 2 * all_heads * size * _BYTES[stored])
