"""Between the public messages and the domain, both ways."""

from __future__ import annotations

from orchestrator.front.validation import MOST_MESSAGES, Validator, new_seed
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.peers.text.measures import TextTimes
from tandem.peers.text.values import FinishReason, Generation, Origin, Request, Round, Summary
from tandem.rpc import log_probs, messages
from tandem.speculation.request.log_probs import TokenLogProb
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
    FinishReason.DEAD_END: pb.FINISH_REASON_DEAD_END,
}


def request_from(message: pb.Generation) -> Request:
    """A request as it came; lists stay unread until their lengths are known.

    Raises:
        InvalidRequest: the sampling is out of range.
    """
    stopping, speculation = message.stopping, message.speculation
    return Request(
        sampling=messages.sampling_from(message.sampling, default_seed=new_seed()),
        prompt=message.prompt if message.HasField("prompt") else None,
        prompt_ids=message.prompt_token_ids,
        chat=[
            {"role": each.role, "content": each.content}
            for each in message.chat.messages[: MOST_MESSAGES + 1]
        ],
        request_id=message.request_id,
        max_new_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
        ignore_eos=stopping.ignore_eos,
        stop_token_ids=stopping.stop_token_ids,
        stop_strings=stopping.stop_strings,
        verifier=speculation.verifier if speculation.HasField("verifier") else None,
        gamma=speculation.gamma if speculation.HasField("gamma") else None,
        nodes=speculation.max_nodes if speculation.HasField("max_nodes") else None,
        verifier_options=speculation.verifier_options,
        first_round=message.first_round,
        received_ids=message.received_token_ids,
        bad_strings=message.bad_strings,
        log_probs=log_probs.wanted_from(message.log_probs)
        if message.HasField("log_probs")
        else None,
        seeded=message.sampling.HasField("seed"),
        cache_salt=message.cache_salt,
        cache_key=message.prompt_cache_key,
        learn=message.learn if message.HasField("learn") else True,
    )


def round_to(round_: Round) -> pb.Round:
    """One round's message."""
    message = pb.Round()
    write_round(message, round_)
    return message


def write_round(message: pb.Round, round_: Round) -> None:
    """Fill one round in, into an empty message: one that is made apart is copied."""
    message.round, message.gamma, message.nodes = round_.number, round_.gamma, round_.nodes
    for token in round_.tokens:
        told = message.tokens.add()
        told.id, told.origin = token.id, _ORIGINS[token.origin]
        if token.text:
            told.text = token.text
        if token.siblings:
            told.siblings = token.siblings
        if token.log_prob is not None:
            told.log_prob.CopyFrom(_log_prob_to(token.id, token.log_prob))
    if round_.prompt_log_probs:
        message.prompt_log_probs.extend(_log_prob_to(*each) for each in round_.prompt_log_probs)
    if round_.expected is not None:
        message.expected_tokens = round_.expected.tokens
        message.expected_wall_ns = int(round_.expected.wall_ns)


def _log_prob_to(token_id: int, log_prob: TokenLogProb | None) -> pb.TokenLogProb:
    if log_prob is None:
        return pb.TokenLogProb(id=token_id)
    top = [pb.TokenLogProb.Top(id=other, value=value) for other, value in log_prob.top]
    return pb.TokenLogProb(id=token_id, value=log_prob.value, top=top)


def summary_to(summary: Summary) -> pb.Summary:
    """The last message."""
    generation, counts = summary.generation, summary.counts
    return pb.Summary(
        request_id=generation.request_id,
        finish_reason=_REASONS[summary.finish_reason],
        stop_string=summary.stop_string,
        tail=summary.tail,
        prompt_tokens=len(generation.prompt_ids),
        new_tokens=counts.new_tokens,
        rounds=len(counts.gammas),
        drafted_tokens=counts.drafted_tokens,
        accepted_tokens=counts.accepted_tokens,
        accepted_per_position=counts.accepted_per_position,
        accepted_per_rank=counts.accepted_per_rank,
        block_efficiency=counts.block_efficiency,
        acceptance_rate=counts.acceptance_rate,
        overlap_sum=counts.overlap_sum,
        overlap_positions=counts.overlap_positions,
        gammas=counts.gammas,
        nodes=counts.nodes,
        draft_bytes=counts.draft_bytes,
        feedback_bytes=counts.feedback_bytes,
        undrafted_rounds=counts.undrafted_rounds,
        drafter_lost=summary.drafter_lost,
        cached_tokens=counts.cached_tokens.get("target", 0),
        drafter_cached_tokens=counts.cached_tokens.get("drafter", 0),
        given_back=counts.given_back,
        drafter_weights_version=counts.weights_version,
        stages=_stages_to(summary.times),
        effective=_effective(generation),
    )


def _effective(generation: Generation) -> pb.Effective:
    stopping = generation.stopping
    sampling = messages.sampling_to(generation.sampling)
    sampling.shaping.ClearField("end_token_ids")  # ours: a client that repeats it leaves them out
    if not generation.sampling.shaping:
        sampling.ClearField("shaping")
    return pb.Effective(
        sampling=sampling,
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
            verifier_options=generation.verifier_options,
        ),
        first_round=generation.first_round,
    )


def _stages_to(times: TextTimes) -> pb.Stages:
    """The text's times, now."""
    waits = {f"{name}_ns": times.spent_ns(name) for name in WAITS}
    busy = {f"{name}_busy_ns": times.busy_ns.get(name, 0) for name in BUSY}
    return pb.Stages(
        **waits,
        **busy,
        total_ns=times.elapsed_ns(),
        time_to_first_token_ns=times.first_token_ns,
        round_wall_ns=times.round_wall_ns,
        round_model_ns=times.round_model_ns,
    )


def info_to(validator: Validator) -> pb.GetModelInfoResponse:
    """What is served, and what a client may ask for."""
    capabilities = validator.capabilities
    return pb.GetModelInfoResponse(
        target=capabilities.target,
        drafter=None if capabilities.by_target else capabilities.drafter,
        verifiers=list(capabilities.rules),
        default_verifier=validator.verifier,
        default_gamma=None
        if validator.gamma is None
        else min(validator.gamma, capabilities.largest.gamma),
        max_gamma=capabilities.largest.gamma,
        max_nodes=capabilities.largest.nodes,
        default_nodes=None
        if validator.nodes is None
        else min(validator.nodes, capabilities.largest.nodes),
        drafter_recipes=capabilities.recipes,
        drafts_by_target=capabilities.by_target,
    )
