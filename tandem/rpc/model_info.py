"""What a service with a model says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.common.v1 import common_pb2
from tandem.rpc.messages import PROTOCOL_VERSION

if TYPE_CHECKING:  # the module is free of torch, for the orchestrator's sake
    from tandem.inference.engine import Engine


def model_info(engine: Engine[Any, Any], max_length: int, max_gamma: int) -> common_pb2.ModelInfo:
    """The handshake's message."""
    decoder = engine.decoder
    return common_pb2.ModelInfo(
        model=decoder.name,
        protocol_version=PROTOCOL_VERSION,
        vocab_size=decoder.vocab_size,
        tokenizer_fingerprint=decoder.tokenizer_fingerprint,
        eos_token_ids=decoder.eos_token_ids,
        max_length=max_length,
        max_gamma=max_gamma,
        max_sequences=engine.admission.limits.max_sequences,
        dtype=decoder.dtype,
        device=decoder.device.type,
        parameters=decoder.parameters,
    )


def engine_stats(engine: Engine[Any, Any]) -> common_pb2.EngineStats:
    """The work done since the start."""
    return common_pb2.EngineStats(
        open_sequences=engine.admission.open_sequences,
        forward_passes=engine.decoder.forward_passes,
        fed_tokens=engine.decoder.fed_tokens,
        opened_sequences=engine.admission.opened,
    )
