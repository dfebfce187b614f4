"""Rows of embeddings that name no token: what look-ahead probes are computed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import StartupError, first_line

_FILE = "extra_embeddings.safetensors"
_NAME, _MADE_FOR = "extra_embeddings", "made_for"


def write_extra_embeddings(folder: Path, rows: Tensor, made_for: str) -> None:
    """Replace a folder's rows.

    Args:
        folder: of the file.
        rows: [rows, hidden size], written in bfloat16.
        made_for: fingerprint of the weights that they were trained for.
    """
    own = {_NAME: rows.detach().to(torch.bfloat16).contiguous()}
    save_file(own, folder / _FILE, {_MADE_FOR: made_for})
    (folder / _FILE).chmod(0o644)  # else its owner's alone


def read_extra_embeddings(folder: str) -> tuple[Tensor, str]:
    """The rows of a folder [rows, hidden size], and the fingerprint of the weights that they were
    made for; empty for any.

    Raises:
        StartupError: there are none, or they cannot be read.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        raise StartupError(f"no extra embeddings in {folder!r}: there is no {_FILE}")
    try:
        with safe_open(path, "pt") as file:
            rows: Tensor = file.get_tensor(_NAME)
            made_for = (file.metadata() or {}).get(_MADE_FOR, "")
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read {path}: {first_line(error)}") from error
    return rows, made_for


def embeddings_beside(folder: str) -> str:
    """The folder, if it has such rows beside other files; else empty."""
    return folder if folder and (Path(folder) / _FILE).is_file() else ""


def embeddings_for(model: PreTrainedModel, folder: str, weights: str) -> Tensor:
    """A folder's rows, as a model takes them.

    Args:
        model: see there.
        folder: see `read_extra_embeddings`.
        weights: fingerprint of the model's.

    Raises:
        StartupError: they cannot be read, or are for another model.
    """
    rows, made_for = read_extra_embeddings(folder)
    if made_for not in ("", weights):
        raise StartupError(
            f"the extra embeddings in {folder!r} are for another model: its weights have the"
            f" fingerprint {made_for[:12]}, this one's {weights[:12]}"
        )
    table = _table_of(model)
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != table.embedding_dim:
        raise StartupError(
            f"the extra embeddings in {folder!r} have the shape {list(rows.shape)}; the model's"
            f" have {table.embedding_dim} numbers each"
        )
    return rows


def add_embeddings(model: PreTrainedModel, rows: Tensor) -> None:
    """Put rows behind a model's embeddings: the ids from its vocabulary's size on name them.

    The output matrix stays as it is. Where it is the embedding itself, it becomes the part of the
    longer one that it was, in the same memory.
    """
    table, head = _table_of(model), model.get_output_embeddings()
    old: Any = table.weight
    longer = torch.cat([old.detach(), rows.to(old.device, old.dtype)])
    if head is not None and head.weight is old:
        head.weight = nn.Parameter(longer[: len(old)], requires_grad=False)
    table.weight = nn.Parameter(longer, requires_grad=False)
    table.num_embeddings = len(longer)


def _table_of(model: PreTrainedModel) -> nn.Embedding:
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise StartupError(f"{type(model).__name__} has no table of embeddings for extra rows")
    return table
