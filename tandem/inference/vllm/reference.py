"""The plain model on the host: what it is, and rows that vLLM's have to agree with."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tandem.errors import StartupError, Unsupported, first_line
from tandem.inference.check.plain import Plain, plain_rows
from tandem.inference.check.texts import ProbeTexts
from tandem.inference.compatibility import check_rewind, max_positions
from tandem.inference.fingerprint import Fingerprints, digest, fingerprints, tokenizer_fingerprint
from tandem.inference.loading.checkpoint import read_model, read_tokenizer
from tandem.inference.vllm.arguments import VllmOptions

_log = structlog.get_logger(__name__)

# Tokens of the probe: they reach into a second block of vLLM's cache on a CPU (128 positions).
_LENGTH = 144


@dataclass(frozen=True)
class Reference:
    """A checkpoint as transformers has it.

    Attributes:
        model: on the host; only its configuration is used once vLLM is loaded.
        tokenizer: of it; None without one.
        hashes: of it; another quantisation is another model, of the same weights.
        expected: plain rows of the probe's texts; None where vLLM's may differ from them.
    """

    model: PreTrainedModel
    tokenizer: Any
    hashes: Fingerprints
    expected: Plain | None


def config_of(model: str) -> Any:
    """A checkpoint's configuration.

    Raises:
        StartupError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers passes on its readers' exceptions, of any kind
        raise StartupError(f"cannot load the model {model!r}: {first_line(error)}") from error


def dtype_of(model: str, device: str, dtype: str) -> str:
    """The name of the dtype that a setting stands for.

    Raises:
        StartupError: the checkpoint's configuration cannot be read.
    """
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cpu":
        return "float32"
    return str(config_of(model).dtype or torch.float32).removeprefix("torch.")


def reference_of(options: VllmOptions, dtype: str) -> Reference:
    """Read a checkpoint, and compute a text by it.

    Args:
        options: what is asked for.
        dtype: a name.

    Raises:
        StartupError: one sentence on what is missing or broken.
    """
    quantized = getattr(config_of(options.model), "quantization_config", None)
    plain = _outline(options.model) if quantized else read_model(options.model, "cpu", dtype).eval()
    check_rewind(plain)
    tokenizer = read_tokenizer(options.model)
    own = tokenizer_fingerprint(tokenizer)
    hashes = _of_files(options.model, own) if quantized else fingerprints(plain, own)
    if options.quantization or options.further:
        # Another law, of the same weights.
        law = json.dumps([hashes.model, options.quantization, options.further], default=str)
        hashes = Fingerprints(hashlib.sha256(law.encode()).hexdigest(), hashes.weights)
    expected = None
    if quantized or options.quantization:
        _log.info("quantised logits are not compared with plain ones")
    elif options.checked:
        config = plain.config.get_text_config()
        length = min(_LENGTH, max_positions(config), options.longest)
        try:
            with torch.inference_mode():
                expected = plain_rows(plain, ProbeTexts.of(int(config.vocab_size), length))
        except Unsupported as error:
            _log.warning("vLLM's logits are not compared with plain ones", reason=str(error))
    return Reference(plain, tokenizer, hashes, expected)


def _outline(model: str) -> PreTrainedModel:
    """A model without its weights, which transformers may not be able to read.

    Raises:
        StartupError: transformers does not know it.
    """
    try:
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config_of(model), trust_remote_code=False)
        with suppress(OSError):  # there is none
            outline.generation_config = GenerationConfig.from_pretrained(model)
    except Exception as error:  # of any kind
        raise StartupError(f"cannot load the model {model!r}: {first_line(error)}") from error
    return outline


def _of_files(model: str, tokenizer: str) -> Fingerprints:
    """Of the tensors in a checkpoint's files.

    Raises:
        StartupError: they cannot be read.
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
    config = config_of(model).to_json_string()
    both = hashlib.sha256(json.dumps([sorted(digests), config]).encode()).hexdigest()
    return Fingerprints(hashlib.sha256(f"{both} {tokenizer}".encode()).hexdigest(), both)
