"""A decoder from a service's settings, the engine over it, and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from tandem.common.v1 import common_pb2
from tandem.engine.admission import Admission
from tandem.engine.engine import Engine
from tandem.engine.schedule import BatchLimits
from tandem.engine.stepper import Stepper
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
from tandem.inference.model import Model
from tandem.inference.passes.largest import LargestPass
from tandem.kernels.warm_up import warm_up
from tandem.lengths import ANY_LENGTH
from tandem.profile import Profile
from tandem.rpc.messages import PROTOCOL_VERSION
from tandem.serving.fingerprint import fingerprint_of
from tandem.serving.servicer import admission_limits
from tandem.settings import MIB, ModelSettings

_log = structlog.get_logger(__name__)

# What prompts add to a pass on a CPU; on any other device what `BatchLimits` says. Passes are
# measured alone, but other processes use the cores too, and their prompts come at the same time.
PREFILL_SHARES = {"cpu": 0.3}


def options_of(settings: ModelSettings, room: int = 0) -> DecoderOptions:
    """How a decoder is to compute. On a CPU its KV cache is bounded by what the sequences may need:
    all that a device has is its services'.

    Args:
        settings: of the service.
        room: positions of each sequence beside its text.
    """
    limits = BatchLimits(settings.token_budget, settings.prefill_chunk)
    round_ = settings.max_gamma + 1
    all_of_it = settings.device.startswith("cuda")
    return DecoderOptions(
        cache_tokens=settings.cache_tokens,
        at_most=ANY_LENGTH if all_of_it else settings.cache_for(room),
        share=settings.memory_share,
        largest=LargestPass(limits.largest + round_, settings.token_budget + round_),
        threads=settings.threads,
        engine=settings.engine,
        graph_rows=settings.graph_rows,
        longest=settings.longest,
    )


def load_decoder(
    source: CheckpointSource,
    options: DecoderOptions,
    settings: ModelSettings,
    beside: Model | None = None,
) -> Decoder:
    """A checkpoint's decoder, measured.

    Args:
        source: of the checkpoint.
        options: how it computes, see `options_of`.
        settings: of the service.
        beside: a larger model of this process, whose sequences it has too: it needs no more memory
            and no more threads than that one.

    Raises:
        StartupError: one sentence on what is missing, broken or too large.
    """
    if beside:
        longest = min(options.longest, beside.positions)
        options = replace(options, at_most=beside.positions, longest=longest, threads=None)
        if isinstance(beside, Decoder):  # their passes take turns
            options = replace(options, passes=beside.pass_memory)
    decoder = Decoder(read_checkpoint(source), options)
    each = decoder.pool.bytes_per_position
    _log.info(
        "KV cache",
        bytes=decoder.positions * each,
        tokens=decoder.positions,
        bytes_a_token=each,
        longest_text=max_length(decoder, settings),
    )
    name = f"{decoder.about.name}: " if beside else ""
    prepare(decoder, settings, name)
    block = decoder.pool.blocks.size
    if decoder.positions < block:
        raise StartupError(
            f"{name}a KV cache of {decoder.positions} tokens does not hold one block of {block};"
            " raise CACHE_TOKENS"
        )
    return decoder


def prepare(model: Model, settings: ModelSettings, name: str = "") -> None:
    """Check that a model has room for a sequence of the greatest length, measure its passes, and
    compile what draws from them.

    Args:
        model: loaded.
        settings: of the service.
        name: begins the sentence, where there are several models.

    Raises:
        StartupError: it has not.
    """
    positions, longest = model.positions, max_length(model, settings)
    if positions < longest:
        raise StartupError(
            f"{name}a KV cache of {positions} tokens does not hold a sequence of {longest};"
            " raise CACHE_TOKENS or lower MAX_LENGTH"
        )
    _log.info("pass", engine=model.engine, dtype=model.dtype, cache_tokens=positions)
    model.measure(longest)
    warm_up(model.device, model.vocab_size, model.dtype)


def max_length(model: Model, settings: ModelSettings) -> int:
    """Tokens a sequence may hold."""
    longest = min(model.about.max_length, settings.longest)
    # A length that was asked for is one to keep, see `prepare`.
    return longest if settings.max_length else min(longest, model.positions or longest)


def engine_over(decoders: Sequence[Model], settings: ModelSettings, name: str) -> Engine:
    """An engine over decoders, not started; its steps are timed on the first one's device. Each
    sequence gets a part of every one's KV cache, or of none."""
    profile, device = Profile(decoders[0].pass_times), decoders[0].device.type
    limits = BatchLimits(
        settings.token_budget,
        settings.prefill_chunk,
        settings.prefill_share or PREFILL_SHARES.get(device, BatchLimits().prefill_share),
        settings.gather,
        profile,
        _span_of(decoders[0]),
    )
    admission = Admission(decoders, admission_limits(settings))
    stepper = Stepper(decoders[0].device, lambda: all(one.engine == "openvino" for one in decoders))
    return Engine(name, admission, limits, stepper)


def _span_of(model: Model) -> float:
    """See `BatchLimits`: a row multiplies each weight once, and adds two products of its width for
    each position before it in each layer."""
    about = model.about
    return about.parameters / max(2 * about.layers * about.hidden_size, 1)


def info_of(model: Model, settings: ModelSettings, *law: str | float) -> common_pb2.ModelInfo:
    """The handshake's message.

    Args:
        model: loaded.
        settings: of the service.
        law: what determines its texts besides the model.
    """
    about = model.about
    return common_pb2.ModelInfo(
        model=about.name,
        protocol_version=PROTOCOL_VERSION,
        vocab_size=about.vocab_size,
        tokenizer_fingerprint=about.tokenizer_fingerprint,
        eos_token_ids=about.eos_token_ids,
        max_length=max_length(model, settings),
        max_gamma=settings.max_gamma,
        max_sequences=settings.max_sequences,
        device=model.device.type,
        parameters=about.parameters,
        max_message_bytes=settings.max_message_mib * MIB,
        fingerprint=fingerprint_of(about.fingerprint, *law),
        zone=settings.zone,
        hidden_size=about.hidden_size,
        layers=about.layers,
        weights_fingerprint=about.weights_fingerprint,
        cache_tokens=model.positions,
    )
