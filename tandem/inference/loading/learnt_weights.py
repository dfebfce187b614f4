"""Weights that a drafter learnt while it served, in place of its checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tandem.errors import StartupError


class LearntWeights(NamedTuple):
    """Which weights to put in place of a checkpoint's.

    Attributes:
        version: how often weights changed; see `ModelInfo.weights_version` in common.proto.
        path: of the file; empty keeps those of the checkpoint.
        of: weights fingerprint of the checkpoint that they were learnt from; empty for any.
    """

    version: int = 0
    path: str = ""
    of: str = ""


NOTHING_LEARNT = LearntWeights()


class OtherCheckpoint(StartupError):
    """The weights were learnt from another checkpoint."""


def put_in(model: nn.Module, weights_fingerprint: str, learnt: LearntWeights) -> None:
    """Put learnt weights into a checkpoint's model.

    Raises:
        OtherCheckpoint: they were learnt from another one.
        StartupError: the file is broken.
    """
    if learnt.of not in ("", weights_fingerprint):
        raise OtherCheckpoint(
            f"was learnt from weights {learnt.of[:12]}, and the checkpoint has"
            f" {weights_fingerprint[:12]}"
        )
    if learnt.path:
        load_weights(model, Path(learnt.path))


def load_weights(model: nn.Module, path: Path) -> None:
    """Take a model's weights from a file, converted to its own dtype.

    Raises:
        StartupError: the file cannot be read, is of another model, or has a number that is not
            finite. The model is as before.
    """
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read the weights {path}: {error}") from None
    own = dict(model.named_parameters())
    if {name: each.shape for name, each in weights.items()} != {
        name: each.shape for name, each in own.items()
    }:
        raise StartupError(f"the weights {path} are of another model")
    if not all(bool(each.isfinite().all()) for each in weights.values()):
        raise StartupError(f"the weights {path} hold a number that is not finite")
    with torch.no_grad():
        for name, each in own.items():
            each.copy_(weights[name])
