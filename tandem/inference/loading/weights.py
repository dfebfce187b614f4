"""A checkpoint's files as transformers reads them, in a directory or on a model hub: weights,
configuration, tokenizer.
"""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from tandem.checkpoint_folder import gguf_advice
from tandem.errors import StartupError, first_line
from tandem.inference.loading.shared_layers import as_stored

# transformers patches its own classes while it loads; two threads must not do that at once.
_LOADING = threading.Lock()
# A checkpoint is data: code in it is never run, and no prompt on a terminal asks to run it.
_AS_DATA = {"trust_remote_code": False}
# Tensors that no logit of the text depends on: buffers that are computed, layers that predict
# further tokens, and what reads pictures or sound.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\.masked_bias$|^(model\.)?mtp(_layers)?\."
    r"|^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\."
)
# Names in a sentence.
_SHOWN = 3
# Kinds of quantised weights.
_NOT_ON_A_CPU = frozenset({"fp8"})
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
        config = as_stored(model, AutoConfig.from_pretrained(model, **_AS_DATA))
        _require_quantisation(model, config, where)
        with _LOADING:
            loaded, report = AutoModelForCausalLM.from_pretrained(
                model,
                config=config,
                dtype=wanted,
                output_loading_info=True,
                use_safetensors=True,  # the other format is a pickle, which can run code
                # Tensor by tensor: a copy of the whole would need as much memory of the host.
                device_map=None if where.type == "cpu" else {"": where},
                **_AS_DATA,
            )
        loaded = loaded.to(where)
    except StartupError:
        raise
    except Exception as error:  # transformers passes on its readers' exceptions, of any kind
        raise StartupError(
            f"cannot load the model {model!r}: {type(error).__name__}: {first_line(error)}"
        ) from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise StartupError(f"the model {model!r} lacks weights: {missing}")
    _require_all_read(model, config, report["unexpected_keys"])
    return loaded


def read_config(model: str) -> Any:
    """A checkpoint's configuration.

    Raises:
        StartupError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(model, **_AS_DATA)
    except Exception as error:  # transformers passes on its readers' exceptions, of any kind
        raise StartupError(f"cannot load the model {model!r}: {first_line(error)}") from error


def dtype_of(model: str, device: str, dtype: str) -> str:
    """The name of the dtype that a setting stands for, for an engine that reads weights itself.

    Raises:
        StartupError: the checkpoint's configuration cannot be read.
    """
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cpu":
        return "float32"
    return str(read_config(model).dtype or torch.float32).removeprefix("torch.")


def _require_quantisation(model: str, config: Any, device: torch.device) -> None:
    """Refuse quantised weights that would be read as if they were none, or cannot be computed.

    Raises:
        StartupError: which kind they are.
    """
    own = getattr(config.get_text_config(), "quantization_config", None)
    own = own or getattr(config, "quantization_config", None)
    if own is None:
        return
    method = str(own.get("quant_method") if isinstance(own, dict) else own.quant_method)
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise StartupError(
            f"the model {model!r} is quantised by {method!r}, which transformers does not know"
            f" ({known}): take its weights without quantisation, or serve it with"
            " TANDEM_TARGET_ENGINE=vllm"
        )
    if device.type == "cpu" and method in _NOT_ON_A_CPU:
        raise StartupError(
            f"the model {model!r} is quantised by {method!r}, which needs a GPU: set DEVICE, or"
            " take its weights without quantisation"
        )


def _require_all_read(model: str, config: Any, left: Iterable[str]) -> None:
    """Refuse weights that a model has no place for: it would be served as if it were right.

    Args:
        model: its name.
        config: of the checkpoint.
        left: names of tensors that were not read.

    Raises:
        StartupError: what the folder is, and which tensors would be left out.
    """
    text = config.get_text_config()
    first = int(getattr(text, "num_hidden_layers", 0) or 0)
    # Layers after the last one that predict further tokens (DeepSeek, GLM).
    further = range(first, first + int(getattr(text, "num_nextn_predict_layers", 0) or 0))
    predicting = tuple(f"model.layers.{layer}." for layer in further)
    rest = sorted(
        name for name in left if not _HARMLESS.search(name) and not name.startswith(predicting)
    )
    if rest:
        kind = ", ".join(config.architectures or ()) or config.model_type
        more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
        raise StartupError(
            f"the model {model!r} ({kind}) has weights that its config.json has no place for, and"
            f" that would be left out: {', '.join(rest[:_SHOWN])}{more}; it is a model of another"
            " kind, or config.json is not its own"
        )


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
    if device.type == "cuda":
        # torch prefers cuDNN's attention on a Hopper or Blackwell card. That makes a plan in each
        # thread for each length of a text: 23 to 37 ms, where a pass takes 10.
        torch.backends.cuda.enable_cudnn_sdp(False)
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
