"""A checkpoint without its weights, for an engine that reads them itself.

transformers may not be able to read quantised weights as that engine does, or at all.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tandem.errors import StartupError, first_line
from tandem.inference.fingerprint import Fingerprints, digest
from tandem.inference.loading.shared_layers import CYCLES
from tandem.inference.loading.weights import read_config


def read_outline(model: str) -> PreTrainedModel:
    """A checkpoint's causal language model on "meta".

    Args:
        model: directory or hub id.

    Raises:
        StartupError: transformers does not know it.
    """
    config = read_config(model)
    if getattr(config, CYCLES, 1) != 1:
        raise StartupError(
            f"the model {model!r} uses its layers several times ({CYCLES}), which ENGINE=vllm does"
            " not know; set ENGINE=torch"
        )
    try:
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        with suppress(OSError):  # there is none
            outline.generation_config = GenerationConfig.from_pretrained(model)
    except Exception as error:  # of any kind
        raise StartupError(f"cannot load the model {model!r}: {first_line(error)}") from error
    return outline


def fingerprints_of_files(model: str, tokenizer: str) -> Fingerprints:
    """Hashes of the tensors in a checkpoint's files.

    Args:
        model: directory.
        tokenizer: its hash.

    Raises:
        StartupError: they cannot be read, or there are none.
    """
    digests: list[tuple[str, str]] = []
    try:
        files = sorted(Path(model).glob("*.safetensors"))
        for file in files:
            with safe_open(file, "pt") as tensors:
                digests += [(name, digest(tensors.get_tensor(name))) for name in tensors.keys()]  # noqa: SIM118
    except Exception as error:  # of any kind
        raise StartupError(f"cannot read the weights of {model!r}: {first_line(error)}") from error
    if not digests:
        raise StartupError(
            f"ENGINE=vllm: {model!r} is no folder with *.safetensors; a quantised checkpoint has to"
            " be one"
        )
    config = read_config(model).to_json_string()
    both = hashlib.sha256(json.dumps([sorted(digests), config]).encode()).hexdigest()
    return Fingerprints(hashlib.sha256(f"{both} {tokenizer}".encode()).hexdigest(), both)
