"""Texts of what a head is for, with what its target computes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from tandem.distillation.drafters import read_model
from tandem.errors import StartupError
from tandem.inference.heads.target_parts import TargetParts
from tandem.inference.hidden_states import Layers, tapped
from tandem.inference.kv.size import free_memory
from tandem.online.home import home_texts, written_texts
from tandem.online.kept_text import TOP, KeptText, packed, unpacked
from tandem.speculation.feedback import WHOLE_MASS
from tandem.whole_files import writing

# Texts, and bytes of a parameter while the target computes them.
_TEXTS, _BYTES = 24, 4
_CPU = torch.device("cpu")


def head_home(
    target: str,
    file: str,
    length: int,
    kept: Path,
    layers: Layers,
    rest: Callable[[], None] = lambda: None,
) -> list[KeptText]:
    """Texts that the target writes, or those of a file, with its rows and its hidden states. It is
    loaded for that once.

    Args:
        target: its checkpoint; empty where a head's files say all that is needed.
        file: of texts, see `home_texts`; empty for none.
        length: of a text, in tokens.
        kept: file for what was computed.
        layers: whose states.
        rest: is called between two passes.

    Returns:
        No texts where none are named and the checkpoint is not known, or has no room in half of the
        free memory.

    Raises:
        StartupError: the target or the texts cannot be read, or named texts have no target that
            computes them.
    """
    of = _digest(target, file, length, layers)
    try:
        arrays = load_file(kept)
        if np.array_equal(arrays["of"], of):
            return unpacked(arrays)
    except (OSError, SafetensorError, ValueError, KeyError):
        pass
    home = _computed(target, file, length, layers, rest) if target else []
    if home:
        with writing(kept) as fresh:
            save_file({**packed(home), "of": of}, fresh)
    elif file:
        raise StartupError(
            "ONLINE_HOME: the head's target has no room in half of the free memory, and computes no"
            " home texts; unset it to learn without any"
        )
    return home


def _digest(target: str, file: str, length: int, layers: Layers) -> npt.NDArray[np.uint8]:
    """[16] of what home texts are computed from, and of what the file has."""
    digest = blake2b(f"{target}\0{file}\0{length}\0{layers}\0".encode(), digest_size=16)
    try:
        if file:
            digest.update(Path(file).read_bytes())
    except OSError as error:
        raise StartupError(f"ONLINE_HOME: cannot read {file}: {error.strerror}") from None
    return np.frombuffer(digest.digest(), np.uint8)


def _computed(
    target: str, file: str, length: int, layers: Layers, rest: Callable[[], None]
) -> list[KeptText]:
    if TargetParts(target).parameters * _BYTES > free_memory(_CPU) // 2:
        return []
    model = read_model(target, torch.float32, _CPU)
    if file:
        tokens = home_texts(file, target, model, length, Path())[:_TEXTS]
    else:
        tokens = written_texts(model, _TEXTS, length)
    return told_texts(model, tokens, range(length), layers, rest)


@torch.no_grad()
def told_texts(
    model: Any,
    tokens: Tensor,
    places: Sequence[int],
    layers: Layers,
    rest: Callable[[], None] = lambda: None,
) -> list[KeptText]:
    """Texts with what a target would tell of them.

    Args:
        model: of transformers.
        tokens: [n, time] int64.
        places: of rows and states; below time - 1.
        layers: whose states; at least one.
        rest: is called after each pass.
    """
    found = []
    at = torch.tensor(places)
    for text in tokens:
        with tapped(model, layers) as tap:
            assert tap is not None
            told = model(input_ids=text[None], use_cache=False)
            states = tap.take(at)
        assert states is not None
        values, ids = told.logits[0, at].float().topk(min(TOP, told.logits.shape[-1]))
        mass = (values.logsumexp(-1) - told.logits[0, at].float().logsumexp(-1)).exp()
        weights = (values - values[:, :1]).exp()
        rows = np.zeros((2, len(at), TOP))
        rows[:, :, : values.shape[1]] = ids, (weights * WHOLE_MASS).round()
        found.append(
            KeptText(
                text.numpy().astype(np.uint32),
                np.array(places, np.int32),
                rows[0].astype(np.uint32),
                rows[1].astype(np.uint16),
                np.zeros(len(at), np.bool_),
                (mass * WHOLE_MASS).round().clamp(1, WHOLE_MASS).numpy().astype(np.uint16),
                states=states.to(torch.bfloat16).view(torch.int16).numpy(),
            )
        )
        rest()
    return found
