"""What a head takes from its target's checkpoint: sizes, embedding and output matrix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from tandem.errors import StartupError, first_line

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TargetParts:
    """Parts of a checkpoint, read one by one: the rest of the target is not loaded.

    Attributes:
        name: directory or hub id.
    """

    name: str

    @cached_property
    def _empty(self) -> PreTrainedModel:
        """The model without its weights."""
        try:
            config = AutoConfig.from_pretrained(self.name, trust_remote_code=False)
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=False
                )
        except Exception as error:  # transformers passes on its readers' exceptions, of any kind
            raise StartupError(
                f"cannot read the head's target {self.name!r}: {first_line(error)}"
            ) from error
        return model

    def require(self) -> None:
        """Look whether there is a checkpoint.

        Raises:
            StartupError: there is none.
        """
        _ = self._empty

    @property
    def _config(self) -> Any:
        return self._empty.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return int(self._config.hidden_size)

    @property
    def layers(self) -> int:
        """How many it has."""
        return int(self._config.num_hidden_layers)

    @property
    def parameters(self) -> int:
        """How many it has."""
        return sum(each.numel() for each in self._empty.parameters())

    @property
    def longest(self) -> int:
        """Positions of its longest sequence."""
        return int(self._config.max_position_embeddings)

    def embedding(self) -> Tensor:
        """[V, width], what turns a token into the first layer's input.

        Raises:
            StartupError: it cannot be read.
        """
        return self._read(self._empty.get_input_embeddings())

    def output(self) -> Tensor:
        """[V, width], what turns the last hidden state into logits.

        Raises:
            StartupError: it cannot be read.
        """
        if self._config.tie_word_embeddings:
            return self.embedding()
        return self._read(self._empty.get_output_embeddings())

    def _read(self, module: Any) -> Tensor:
        names = [n for n, part in self._empty.named_modules() if part is module]
        try:
            name = f"{names[0]}.weight"
            index = cached_file(self.name, _INDEX, _raise_exceptions_for_missing_entries=False)
            file = _SINGLE
            if index is not None:
                file = json.loads(Path(index).read_text())["weight_map"][name]
            with safe_open(cached_file(self.name, file), "pt") as tensors:
                found: Tensor = tensors.get_tensor(name)
        except Exception as error:  # of any kind, as above
            raise StartupError(
                f"cannot read the embedding of the head's target {self.name!r}: {first_line(error)}"
            ) from error
        return found
