"""Rows of embeddings that name no token: what look-ahead probes are computed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import StartupError, first_line

_FILE = "extra_embeddings.safetensors"
_NAME = "extra_embeddings"


class MadeFor(NamedTuple):
    """What rows were trained for.

    Attributes:
        weights: fingerprint of the model's, without an adapter; empty for any.
        adapter: that of the adapter, see `adapter_fingerprint`; empty for none.
    """

    weights: str = ""
    adapter: str = ""


def write_extra_embeddings(folder: Path, rows: Tensor, made_for: MadeFor) -> None:
    """Replace a folder's rows [rows, hidden size]; they are written in bfloat16."""
    own = {_NAME: rows.detach().to(torch.bfloat16).contiguous()}
    save_file(own, folder / _FILE, made_for._asdict())
    (folder / _FILE).chmod(0o644)  # else its owner's alone


def read_extra_embeddings(folder: str) -> tuple[Tensor, MadeFor]:
    """The rows of a folder [rows, hidden size], and what they were made for.

    Raises:
        StartupError: there are none, or they cannot be read.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        raise StartupError(f"no extra embeddings in {folder!r}: there is no {_FILE}")
    try:
        with safe_open(path, "pt") as file:
            rows: Tensor = file.get_tensor(_NAME)
            told = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read {path}: {first_line(error)}") from error
    return rows, MadeFor(told.get("weights", ""), told.get("adapter", ""))


def embeddings_beside(folder: str) -> str:
    """The folder, if it has such rows beside other files; else empty."""
    return folder if folder and (Path(folder) / _FILE).is_file() else ""


def embeddings_for(model: PreTrainedModel, folder: str, served: MadeFor) -> Tensor:
    """A folder's rows, as a model takes them.

    Args:
        model: that gets the rows.
        folder: see `read_extra_embeddings`.
        served: what the rows have to be made for.

    Raises:
        StartupError: they cannot be read, or are for another model.
    """
    rows, made_for = read_extra_embeddings(folder)
    if made_for.weights and made_for != served:
        if made_for.weights != served.weights:
            own, other = made_for.weights[:12], served.weights[:12]
            what = f"its weights have the fingerprint {own}, these {other}"
        elif made_for.adapter:
            what = "they were trained with another adapter"
        else:
            what = "they were trained without an adapter"
        raise StartupError(f"the extra embeddings in {folder!r} are for another target: {what}")
    table = _table_of(model)
    if table.num_embeddings != model.config.get_text_config().vocab_size:
        raise StartupError(
            f"the model has {table.num_embeddings} embeddings for"
            f" {model.config.get_text_config().vocab_size} ids: extra ones would have no place"
        )
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != table.embedding_dim:
        raise StartupError(
            f"the extra embeddings in {folder!r} have the shape {list(rows.shape)}; the model's"
            f" have {table.embedding_dim} numbers each"
        )
    return rows


def add_embeddings(model: PreTrainedModel, rows: Tensor) -> None:
    """Put rows after a model's embeddings: the ids from its vocabulary's size on name them.

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
