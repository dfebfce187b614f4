"""Between the public messages and the domain, both ways."""

from __future__ import annotations

import secrets

from orchestrator.front.validation import Terms
from orchestrator.text.ledger import Ledger
from orchestrator.text.round import Origin, Round
from orchestrator.text.summary import FinishReason, Summary
from orchestrator.text.values import Generation, Request
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc import messages
from tandem.telemetry.stages import BUSY, WAITS

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


def request_from(message: pb.Generation) -> Request:
    """A request as it came; lists stay unread until their lengths are known.

    Raises:
        InvalidRequest: the sampling is out of range.
    """
    stopping, speculation = message.stopping, message.speculation
    return Request(
        sampling=messages.sampling_from(message.sampling, default_seed=secrets.randbits(64)),
        prompt=message.prompt if message.HasField("prompt") else None,
        prompt_ids=message.prompt_token_ids,
        request_id=message.request_id,
        max_new_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
        ignore_eos=stopping.ignore_eos,
        stop_token_ids=stopping.stop_token_ids,
        stop_strings=stopping.stop_strings,
        verifier=speculation.verifier if speculation.HasField("verifier") else None,
        gamma=speculation.gamma if speculation.HasField("gamma") else None,
        nodes=speculation.max_nodes if speculation.HasField("max_nodes") else None,
        first_round=message.first_round,
        received_ids=message.received_token_ids,
    )


def round_to(round_: Round) -> pb.Round:
    """One round's message."""
    tokens = [
        pb.Token(
            id=token.id,
            origin=_ORIGINS[token.origin],
            text=token.text,
            siblings=token.siblings,
        )
        for token in round_.tokens
    ]
    message = pb.Round(round=round_.number, tokens=tokens, gamma=round_.gamma, nodes=round_.nodes)
    if round_.expected is not None:
        message.expected_tokens = round_.expected.tokens
        message.expected_wall_ns = int(round_.expected.wall_ns)
    return message


def summary_to(summary: Summary) -> pb.Summary:
    """The last message."""
    generation, tally = summary.generation, summary.tally
    return pb.Summary(
        request_id=generation.request_id,
        finish_reason=_REASONS[summary.finish_reason],
        stop_string=summary.stop_string,
        prompt_tokens=len(generation.prompt_ids),
        new_tokens=tally.new_tokens,
        rounds=len(tally.gammas),
        drafted_tokens=tally.drafted_tokens,
        accepted_tokens=tally.accepted_tokens,
        accepted_per_position=tally.accepted_per_position,
        accepted_per_rank=tally.accepted_per_rank,
        block_efficiency=tally.block_efficiency,
        acceptance_rate=tally.acceptance_rate,
        overlap_sum=tally.overlap_sum,
        overlap_positions=tally.overlap_positions,
        gammas=tally.gammas,
        nodes=tally.nodes,
        draft_bytes=tally.draft_bytes,
        drafter_lost=summary.drafter_lost,
        stages=_stages_to(summary.ledger),
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
        speculation=pb.Speculation(
            verifier=generation.verifier,
            gamma=generation.gamma,
            max_nodes=generation.nodes or None,
        ),
        first_round=generation.first_round,
    )


def _stages_to(clock: Ledger) -> pb.Stages:
    """The request's ledger, now."""
    waits = {f"{name}_ns": clock.spent_ns(name) for name in WAITS}
    busy = {f"{name}_busy_ns": clock.busy_ns.get(name, 0) for name in BUSY}
    return pb.Stages(
        **waits,
        **busy,
        total_ns=clock.elapsed_ns(),
        time_to_first_token_ns=clock.first_token_ns,
        round_wall_ns=clock.round_wall_ns,
        round_model_ns=clock.round_model_ns,
    )


def info_to(terms: Terms) -> pb.GetModelInfoResponse:
    """What is served, and what a client may ask for."""
    offer = terms.offer
    return pb.GetModelInfoResponse(
        target=offer.target,
        drafter=offer.drafter,
        verifiers=list(offer.rules),
        default_verifier=terms.verifier,
        default_gamma=None if terms.gamma is None else min(terms.gamma, offer.max_gamma),
        max_gamma=offer.max_gamma,
        max_nodes=offer.max_nodes,
        default_nodes=None if terms.nodes is None else min(terms.nodes, offer.max_nodes),
        drafter_recipes=offer.recipes,
    )
