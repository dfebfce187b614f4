"""A checkpoint: the model and the tokenizer in a directory or on a model hub."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tandem.checkpoint_folder import gguf_advice
from tandem.errors import StartupError, first_line

# transformers patches its own classes while it loads; two threads must not do that at once.
_LOADING = threading.Lock()
# A checkpoint is data: code in it is never run, and no prompt on a terminal asks to run it.
_AS_DATA = {"trust_remote_code": False}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_model(model: str, device: str, dtype: str) -> PreTrainedModel:
    """A checkpoint's causal language model, on a device.

    Args:
        model: directory or hub id.
        device: as torch names it ("cpu", "cuda", "cuda:1").
        dtype: a name; "auto" is float32 on a CPU, else the checkpoint's.

    Raises:
        StartupError: what is missing or broken, in one sentence.
    """
    where = device_of(device)
    disable_progress_bar()  # bars would tear the structured log
    if dtype == "auto":
        wanted: Any = torch.float32 if where.type == "cpu" else "auto"
    else:
        wanted = _DTYPES[dtype]
    # For a missing directory, transformers would complain about a malformed hub id.
    if not (Path(model) / "config.json").is_file():
        if advice := gguf_advice(model):
            raise StartupError(f"cannot load the model {model!r}: {advice}")
        if os.path.isabs(model):
            raise StartupError(
                f"cannot load the model {model!r}: there is no {model}/config.json; mount the model"
                " there, or set MODEL to where it is"
            )
    try:
        config = AutoConfig.from_pretrained(model, **_AS_DATA)
        with _LOADING:
            loaded, report = AutoModelForCausalLM.from_pretrained(
                model,
                config=config,
                dtype=wanted,
                output_loading_info=True,
                use_safetensors=True,  # the other format is a pickle, which can run code
                **_AS_DATA,
            )
        loaded = loaded.to(where)
    except Exception as error:  # transformers passes on its readers' exceptions, of any kind
        raise StartupError(
            f"cannot load the model {model!r}: {type(error).__name__}: {first_line(error)}"
        ) from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise StartupError(f"the model {model!r} lacks weights: {missing}")
    return loaded


def device_of(name: str) -> torch.device:
    """A device that can be used.

    Raises:
        StartupError: it cannot.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise StartupError(f"cannot use the device {name!r}: {first_line(error)}") from error
    return device


def read_tokenizer(model: str) -> Any:
    """A checkpoint's fast tokenizer, or None if it has no tokenizer at all.

    Raises:
        StartupError: the tokenizer cannot be read, or has no fast version.
    """
    if Path(model).is_dir() and not list(Path(model).glob("tokenizer*")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **_AS_DATA)
    except Exception as error:
        raise StartupError(
            f"cannot load the tokenizer of {model!r}: {first_line(error)}"
        ) from error
    if not tokenizer.is_fast:
        raise StartupError(f"the tokenizer of {model!r} has no fast (Rust) version to hand out")
    return tokenizer


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares the weights, and nothing else: changing one leaves the other alone."""
    copied: PreTrainedModel = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    return copied
