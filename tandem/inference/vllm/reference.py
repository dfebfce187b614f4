"""The plain model on the host: what it is, and rows that vLLM's have to agree with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from transformers import AutoConfig, PreTrainedModel

from tandem.errors import StartupError, first_line
from tandem.inference.checkpoint import read_model, read_tokenizer
from tandem.inference.compatibility import check_rewind, max_positions, plain_pass
from tandem.inference.fingerprint import Fingerprints, fingerprints, tokenizer_fingerprint
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import PROBE

_log = structlog.get_logger(__name__)

# Repetitions of the probe that reach into a second block of vLLM's cache on a CPU (128 positions).
_LONGER = 12


@dataclass(frozen=True)
class Reference:
    """A checkpoint as transformers has it.

    Attributes:
        model: on the host; only its configuration is used once vLLM is loaded.
        tokenizer: of it; None without one.
        hashes: of it; another quantisation is another model, of the same weights.
        text: that is probed.
        expected: plain rows of the text; None where vLLM's may differ from them.
    """

    model: PreTrainedModel
    tokenizer: Any
    hashes: Fingerprints
    text: tuple[int, ...]
    expected: PassOutput | None


def dtype_of(model: str, device: str, dtype: str) -> str:
    """The name of the dtype that a setting stands for.

    Raises:
        StartupError: the checkpoint's configuration cannot be read.
    """
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    try:
        own = AutoConfig.from_pretrained(model, trust_remote_code=False).dtype
    except Exception as error:  # transformers passes on its readers' exceptions, of any kind
        raise StartupError(f"cannot load the model {model!r}: {first_line(error)}") from error
    return str(own or torch.float32).removeprefix("torch.")


def reference_of(model: str, dtype: str, quantization: str, checked: bool) -> Reference:
    """Read a checkpoint, and compute a text by it.

    Args:
        model: directory or hub id.
        dtype: a name.
        quantization: vLLM's name of one that it applies; empty for none.
        checked: whether rows are wanted.

    Raises:
        StartupError: one sentence on what is missing or broken.
    """
    plain = read_model(model, "cpu", dtype).eval()
    check_rewind(plain)
    tokenizer = read_tokenizer(model)
    hashes = fingerprints(plain, tokenizer_fingerprint(tokenizer))
    text = (PROBE * _LONGER)[: max_positions(plain.config.get_text_config())]
    if quantization:
        law = hashlib.sha256(f"{hashes.model} {quantization}".encode()).hexdigest()
        hashes = Fingerprints(law, hashes.weights)
        _log.info("quantised logits are not compared with plain ones", quantization=quantization)
    expected = None
    if checked and not quantization:
        with torch.inference_mode():
            expected = plain_pass(plain, text)
    return Reference(plain, tokenizer, hashes, text, expected)
