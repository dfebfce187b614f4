"""What a checkpoint and its texts take of memory, from its files; without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import first_line
from tandem.failure import Misconfigured
from tandem.lengths import TOKENS_EACH

# Of GPT-2 and its kind.
_NAMES = {
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of a CPU, where the kernel lets a process choose (see `MEMORY` of `tandem.tools.local.process`).
_PAGE = 2 << 20
_WEIGHTS = ("*.safetensors", "*.bin")
# Bytes of a device that a model takes whatever its size: libraries, passes.
_EACH = 2 << 30
# The first one's share where some model is not on this machine: mostly the others are small.
_FIRST = 0.8


@dataclass(frozen=True)
class TextMemory:
    """The KV cache of texts.

    Attributes:
        model: name of the checkpoint.
        dtype: of the cache.
        longest: tokens that the model can hold; 0 where its configuration does not say it.
        bytes_a_token: in all layers, keys and values.
        extents: of a text: key heads of all layers, for keys and for values.
    """

    model: str
    dtype: str
    longest: int
    bytes_a_token: int
    extents: int

    def in_pages(self, tokens: int) -> int:
        """Bytes that a text of some tokens takes of a CPU's memory, which comes in huge pages: by
        torch, which has each extent in a place of its own, and at most with OpenVINO."""
        return self.extents * -(-tokens * self.bytes_a_token // (self.extents * _PAGE)) * _PAGE


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
    extents = 2 * all_heads
    return TextMemory(Path(model).name, stored, longest, extents * size * _BYTES[stored], extents)


def shares_of(models: Sequence[str], total: int | None = None) -> list[float]:
    """How models divide the memory of a device that they share: what each takes in any case, and of
    the rest so much that all can hold as many tokens.

    Args:
        models: directories or hub ids of checkpoints; the first one is the largest.
        total: bytes of the device; None where they are not known: then each has what it takes with
            one text, and of the rest in proportion.

    Returns:
        Shares that are 1 together.
    """
    found = [_found_of(model) for model in models]
    known = [each for each in found if each is not None]
    if len(known) < len(models):
        others = len(models) - 1
        return [_FIRST, *[(1 - _FIRST) / others] * others] if others else [1.0]
    fixed, a_token = (sum(parts) for parts in zip(*known, strict=True))
    tokens: float = TOKENS_EACH
    if total is not None and a_token:
        tokens = max((total - fixed) / a_token, tokens)
    needs = [own + tokens * each for own, each in known]
    return [need / sum(needs) for need in needs]


def _found_of(model: str) -> tuple[int, int] | None:
    """Bytes that a model takes whatever its texts, and those of a token; None where the checkpoint
    is not on this machine."""
    folder = _folder_of(model)
    weights = 0
    for pattern in _WEIGHTS:
        # Of a download that was broken off there are links without files.
        weights = weights or sum(f.stat().st_size for f in folder.glob(pattern) if f.is_file())
    if not weights:
        return None
    try:
        return _EACH + weights, memory_of(str(folder), "bfloat16").bytes_a_token
    except Misconfigured:  # of a head, which holds little
        return _EACH + weights, 0


def _folder_of(model: str) -> Path:
    """Of a checkpoint, which a hub may have brought here."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no hub id
        found = None
    return Path(found).parent if isinstance(found, str) else folder
