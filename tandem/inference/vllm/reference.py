"""The plain model on the host: what it is, and rows that vLLM's have to agree with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import structlog
import torch

from tandem.errors import Unsupported
from tandem.inference.check.plain import Plain, plain_rows
from tandem.inference.check.texts import ProbeTexts
from tandem.inference.compatibility import check_rewind
from tandem.inference.loading.checkpoint import (
    CheckpointSource,
    LoadedCheckpoint,
    read_checkpoint,
)
from tandem.inference.loading.weights import read_config
from tandem.inference.vllm.arguments import VllmOptions

_log = structlog.get_logger(__name__)

# Tokens of the probe: they reach into a second block of vLLM's cache on a CPU (128 positions).
_LENGTH = 144


@dataclass(frozen=True)
class Reference:
    """What vLLM's model has to agree with.

    Attributes:
        checkpoint: on the host, or without its weights where these are quantised. Another
            quantisation is another model, of the same weights.
        expected: plain rows of the probe's texts; None where vLLM's may differ from them.
    """

    checkpoint: LoadedCheckpoint
    expected: Plain | None


def reference_of(options: VllmOptions, dtype: str) -> Reference:
    """Read a checkpoint, and compute a text by it.

    Args:
        options: what is asked for.
        dtype: a name.

    Raises:
        StartupError: one sentence on what is missing or broken.
    """
    quantized = getattr(read_config(options.model), "quantization_config", None)
    device = "meta" if quantized else "cpu"
    checkpoint = read_checkpoint(
        CheckpointSource(options.model, device, dtype, masks=options.masks)
    )
    plain, about = checkpoint.model.eval(), checkpoint.about
    check_rewind(plain)
    if options.quantization or options.further:
        # Another law, of the same weights.
        law = json.dumps([about.fingerprint, options.quantization, options.further], default=str)
        about = replace(about, fingerprint=hashlib.sha256(law.encode()).hexdigest())
    expected = None
    if quantized or options.quantization:
        _log.info("quantised logits are not compared with plain ones")
    elif options.checked:
        length = min(_LENGTH, about.max_length, options.longest)
        try:
            with torch.inference_mode():
                expected = plain_rows(plain, ProbeTexts.of(about.vocab_size, length))
        except Unsupported as error:
            _log.warning("vLLM's logits are not compared with plain ones", reason=str(error))
    return Reference(LoadedCheckpoint(plain, about), expected)
