"""Between the public messages and the domain, both ways."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from dataclasses import dataclass

from orchestrator.generation import (
    FinishReason,
    Generation,
    Origin,
    Round,
    Stopping,
    Tally,
    needs_every_draft,
)
from orchestrator.text import TextCodec
from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc import messages
from tandem.telemetry.stages import StageClock

MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING = 256
MAX_FIRST_ROUND = 2**63
# No tokenizer needs more characters for a token, so a longer prompt cannot fit.
_MAX_CHARACTERS_PER_TOKEN = 256

_ORIGINS = {
    Origin.ACCEPTED: pb.TOKEN_ORIGIN_ACCEPTED,
    Origin.CORRECTION: pb.TOKEN_ORIGIN_CORRECTION,
    Origin.BONUS: pb.TOKEN_ORIGIN_BONUS,
}
_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class Terms:
    """What requests are checked against, and where their defaults come from.

    Attributes:
        vocab_size: of the target.
        target_length: tokens that a sequence may hold on the target.
        drafter_length: the same on the drafter; 0 without a drafter.
        max_gamma: longest draft; 0 without a drafter.
        verifiers: known names.
        verifier: the default one.
        gamma: the default draft length.
        max_new_tokens: the default number of tokens.
        codec: the target's tokenizer.
    """

    vocab_size: int
    target_length: int
    drafter_length: int
    max_gamma: int
    verifiers: list[str]
    verifier: str
    gamma: int
    max_new_tokens: int
    codec: TextCodec


def request_id_of(message: pb.Generation) -> str:
    """The request's id, or a new one.

    Raises:
        InvalidRequest: it cannot be an id.
    """
    messages.check_request_id(message.request_id)
    return message.request_id or uuid.uuid4().hex


async def generation_from(
    message: pb.Generation, request_id: str, terms: Terms, clock: StageClock
) -> Generation:
    """A request, validated, with every default filled in.

    Raises:
        InvalidRequest: a field is out of range; the sentence begins with its name.
    """
    sampling = messages.sampling_from(message.sampling, default_seed=secrets.randbits(64))
    if message.first_round > MAX_FIRST_ROUND:
        raise InvalidRequest(f"first_round must be at most {MAX_FIRST_ROUND}")
    verifier, gamma = _speculation(message.speculation, terms)
    if message.first_round and needs_every_draft(verifier, gamma):
        raise InvalidRequest(
            f"first_round: a {verifier} text cannot be resumed, since what its last rounds"
            " owe to the law is not in its tokens; start anew or use block"
        )
    _check_stopping(message.stopping, terms)
    with clock.stage("tokenize"):
        # A long prompt takes long, and other texts go on meanwhile.
        prompt_ids = await asyncio.to_thread(_prompt, message, terms)
    stopping = message.stopping
    max_new_tokens = _max_new_tokens(stopping, len(prompt_ids), gamma, terms)
    return Generation(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        stopping=Stopping(
            max_new_tokens,
            stopping.ignore_eos,
            tuple(stopping.stop_token_ids),
            tuple(stopping.stop_strings),
        ),
        verifier=verifier,
        gamma=gamma,
        first_round=message.first_round,
    )


def _max_new_tokens(message: pb.Stopping, prompt_tokens: int, gamma: int, terms: Terms) -> int:
    limit = min(terms.target_length, terms.drafter_length) if gamma else terms.target_length
    room = limit - prompt_tokens
    asked = message.HasField("max_new_tokens")
    count = message.max_new_tokens if asked else min(terms.max_new_tokens, max(room, 1))
    if count > room:
        raise InvalidRequest(
            f"max_new_tokens: {prompt_tokens} prompt tokens and {count} new ones"
            f" exceed the {limit} tokens that a sequence may hold"
        )
    return count


def _speculation(message: pb.Speculation, terms: Terms) -> tuple[str, int]:
    verifier = message.verifier if message.HasField("verifier") else terms.verifier
    if verifier not in terms.verifiers:
        raise InvalidRequest(f"verifier {verifier!r} is unknown; use one of {terms.verifiers}")
    gamma = message.gamma if message.HasField("gamma") else min(terms.gamma, terms.max_gamma)
    if gamma > terms.max_gamma:
        raise InvalidRequest(f"gamma must be 0..{terms.max_gamma}, got {gamma}")
    return verifier, gamma


def _check_stopping(message: pb.Stopping, terms: Terms) -> None:
    if message.HasField("max_new_tokens") and message.max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens must be at least 1")
    if len(message.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"stop_token_ids may hold {MAX_STOP_TOKENS} ids")
    if any(token >= terms.vocab_size for token in message.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids must be below {terms.vocab_size}")
    if len(message.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop_strings may hold {MAX_STOP_STRINGS} strings")
    if any(not 1 <= len(text) <= MAX_STOP_STRING for text in message.stop_strings):
        raise InvalidRequest(f"stop_strings must have 1..{MAX_STOP_STRING} characters each")
    if message.stop_strings and not terms.codec.has_text:
        raise InvalidRequest("stop_strings need a target with a tokenizer; use stop_token_ids")


def _prompt(message: pb.Generation, terms: Terms) -> list[int]:
    count = len(message.prompt_token_ids)
    if message.HasField("prompt") == bool(count):
        raise InvalidRequest("prompt: give either prompt or prompt_token_ids, and not both")
    if count > terms.target_length:
        raise InvalidRequest(
            f"prompt_token_ids: a sequence may hold {terms.target_length} tokens, got {count}"
        )
    if count:
        token_ids = list(message.prompt_token_ids)
        messages.check_tokens("prompt_token_ids", token_ids, terms.vocab_size)
        return token_ids
    if not message.prompt:
        raise InvalidRequest("prompt must not be empty")
    if not terms.codec.has_text:
        raise InvalidRequest("prompt: this target has no tokenizer; send prompt_token_ids")
    if len(message.prompt) > _MAX_CHARACTERS_PER_TOKEN * terms.target_length:
        raise InvalidRequest(
            f"prompt: {len(message.prompt)} characters cannot fit into {terms.target_length} tokens"
        )
    encoded = terms.codec.encode(message.prompt)
    messages.check_tokens("prompt", encoded, terms.vocab_size)
    return encoded


def round_to(round_: Round) -> pb.Round:
    """One round's message."""
    tokens = [
        pb.Token(id=token.id, origin=_ORIGINS[token.origin], text=token.text)
        for token in round_.tokens
    ]
    return pb.Round(round=round_.number, tokens=tokens, gamma=round_.gamma)


def summary_to(
    generation: Generation,
    tally: Tally,
    finish_reason: FinishReason,
    stop_string: str,
    stages: pb.Stages,
) -> pb.Summary:
    """The last message."""
    return pb.Summary(
        request_id=generation.request_id,
        finish_reason=_REASONS[finish_reason],
        stop_string=stop_string,
        prompt_tokens=len(generation.prompt_ids),
        new_tokens=tally.new_tokens,
        rounds=len(tally.gammas),
        drafted_tokens=tally.drafted_tokens,
        accepted_tokens=tally.accepted_tokens,
        accepted_per_position=tally.accepted_per_position,
        block_efficiency=tally.block_efficiency,
        acceptance_rate=tally.acceptance_rate,
        overlap_sum=tally.overlap_sum,
        overlap_positions=tally.overlap_positions,
        gammas=tally.gammas,
        draft_bytes=tally.draft_bytes,
        drafter_lost=tally.drafter_lost,
        stages=stages,
        effective=_effective(generation),
    )


def _effective(generation: Generation) -> pb.Effective:
    stopping = generation.stopping
    return pb.Effective(
        sampling=messages.sampling_to(generation.sampling),
        stopping=pb.Stopping(
            max_new_tokens=stopping.max_new_tokens,
            ignore_eos=stopping.ignore_eos,
            stop_token_ids=stopping.token_ids,
            stop_strings=stopping.strings,
        ),
        speculation=pb.Speculation(verifier=generation.verifier, gamma=generation.gamma),
        first_round=generation.first_round,
    )


def stages_to(clock: StageClock, tally: Tally, first_token_ns: int) -> pb.Stages:
    """The request's ledger, now."""
    busy = tally.busy_ns
    return pb.Stages(
        tokenize_ns=clock.spent_ns("tokenize"),
        open_wait_ns=clock.spent_ns("open_wait"),
        draft_wait_ns=clock.spent_ns("draft_wait"),
        verify_wait_ns=clock.spent_ns("verify_wait"),
        detokenize_ns=clock.spent_ns("detokenize"),
        send_wait_ns=clock.spent_ns("send_wait"),
        close_wait_ns=clock.spent_ns("close_wait"),
        own_ns=clock.spent_ns("own"),
        total_ns=clock.elapsed_ns(),
        time_to_first_token_ns=first_token_ns,
        drafter_prefill_busy_ns=busy.get("drafter_prefill", 0),
        target_prefill_busy_ns=busy.get("target_prefill", 0),
        draft_queue_busy_ns=busy.get("draft_queue", 0),
        draft_forward_busy_ns=busy.get("draft_forward", 0),
        verify_queue_busy_ns=busy.get("verify_queue", 0),
        verify_forward_busy_ns=busy.get("verify_forward", 0),
        verify_accept_busy_ns=busy.get("verify_accept", 0),
        round_wall_ns=tally.round_wall_ns,
        round_model_ns=tally.round_model_ns,
    )


def info_to(
    terms: Terms, target: common_pb2.ModelInfo, drafter: common_pb2.ModelInfo | None
) -> pb.GetModelInfoResponse:
    """What is served, and what a client may ask for."""
    return pb.GetModelInfoResponse(
        target=target,
        drafter=drafter,
        verifiers=terms.verifiers,
        default_verifier=terms.verifier,
        default_gamma=min(terms.gamma, terms.max_gamma),
        max_gamma=terms.max_gamma,
    )
