"""What is asked of vLLM, and how its model is described to drafters."""

from __future__ import annotations

from typing import Any

from tandem.common.v1 import common_pb2
from tandem.errors import StartupError
from tandem.inference.fingerprint import tokenizer_fingerprint
from tandem.inference.vllm.arguments import SUPPORTED, installed

PROPOSER = "tandem_vllm.Proposer"


def check_version() -> None:
    """Refuse another vLLM than the supported one.

    Raises:
        StartupError: what to install.
    """
    found = installed()
    if found is not None and not found[1].startswith(f"{SUPPORTED}."):
        raise StartupError(
            f"tandem-vllm: {' '.join(found)} is not supported; install {found[0]} {SUPPORTED}, or"
            " the release of tandem-vllm that is for it"
        )


def check_arguments(config: Any) -> None:
    """Refuse what drafts cannot be had with.

    Args:
        config: vLLM's, of the whole engine.

    Raises:
        StartupError: the sentence says what to change.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        raise StartupError(
            "tandem-vllm: drafts by --pipeline-parallel-size are not supported; use"
            " --tensor-parallel-size"
        )


def described(config: Any, tokenizer: Any) -> common_pb2.ModelInfo:
    """vLLM's model as a target that takes chains.

    Args:
        config: vLLM's, of the whole engine.
        tokenizer: of the model; None without one.
    """
    model = config.model_config
    return common_pb2.ModelInfo(
        model=model.model,
        vocab_size=model.get_vocab_size(),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        max_length=model.max_model_len,
        max_gamma=config.speculative_config.num_speculative_tokens,
        max_sequences=config.scheduler_config.max_num_seqs,
    )
