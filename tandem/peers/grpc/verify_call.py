"""A text's sequence on a target, over gRPC: what is asked, and that the answer fits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from opentelemetry.util.types import AttributeValue

from tandem.common.v1 import common_pb2
from tandem.peers.grpc.calls import CountingOn, checked_times, parents_of, times_of
from tandem.peers.grpc.deadlines import Waits
from tandem.peers.text.contracts import DraftReply, Prompt, VerdictReply
from tandem.peers.text.record import TextRecord
from tandem.rpc import messages
from tandem.rpc.feedback import bytes_of, spec_to
from tandem.rpc.log_probs import log_probs_from, wanted_to
from tandem.rpc.streams.call import SequenceCall
from tandem.speculation.request.log_probs import LogProbsWanted, TokenLogProb
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.telemetry.tracing.spans import Span
from tandem.telemetry.tracing.steps import write_inside

VERIFY_METHOD = "tandem.target.v1.TargetService/Verify"
# The largest overlap that is believed: rounding in float32 exceeds 1 by less.
_MOST_OVERLAP = 1.01


class VerifyCall:
    """A sequence on a target.

    Args:
        call: carries it.
        waits: its deadlines.
        record: the text's, which books each exchange.
        replica: that it is for.
    """

    def __init__(
        self,
        call: SequenceCall[target_pb2.SequenceRequest, target_pb2.SequenceResponse],
        waits: Waits,
        record: TextRecord,
        replica: CountingOn,
    ) -> None:
        self._call = call
        self._feedback = spec_to(replica.feedback)
        self._replica = replica
        self._waits = waits
        self._record = record
        self._vocab_size = 0
        self._told: dict[str, AttributeValue] = {}  # of the text, for spans
        self._asked: deque[DraftSize] = deque()  # for each round that was asked for ahead
        self._log_probs: LogProbsWanted | None = None
        self._drafting = False  # whether the target has drafted for this text
        self.resumes = replica.resumes
        self.close = call.close
        self.cancel = call.cancel

    async def open(
        self, prompt: Prompt, verifier: str, size: DraftSize, carry: Any
    ) -> VerdictReply | None:
        """See `TextTarget`."""
        with self._record.stage("open_wait"):
            decided = await self._open(prompt, verifier, size, carry)
        if decided is not None:
            self._record.times.add_prefill("target", decided.times)
        return decided

    async def _open(
        self, prompt: Prompt, verifier: str, size: DraftSize, carry: Any
    ) -> VerdictReply | None:
        self._vocab_size = prompt.target_vocab_size
        self._told = {"tandem.request_id": prompt.request_id, "tandem.verifier": verifier}
        request = target_pb2.OpenSequence(
            request_id=prompt.request_id,
            token_ids=prompt.token_ids,
            sampling=messages.sampling_to(prompt.sampling),
            verifier=verifier,
            verifier_options=prompt.verifier_options,
            first_round=prompt.first_round,
            gamma=size.gamma,
            max_nodes=size.nodes,
            max_new_tokens=prompt.max_new_tokens,
            end_token_ids=prompt.end_token_ids,
            carry=carry,
            fingerprint=self._replica.fingerprint,
            feedback=self._feedback,
            emitted_tokens=prompt.emitted_tokens,
            log_probs=wanted_to(prompt.log_probs),
            cache_salt=prompt.cache_salt,
            resumes=prompt.resumes,
            may_be_given_back=not prompt.in_full,
            goes_first=prompt.in_full,
        )
        self._log_probs = prompt.log_probs
        message = target_pb2.SequenceRequest(open=request)
        span = self._record.spans.call("prefill", VERIFY_METHOD, self._call.address)
        tokens = len(prompt.token_ids)
        # Room for all of a text may take long to come.
        usual = prompt.usual and not prompt.in_full
        seconds = self._waits.opening(tokens, usual=usual)
        reply = await self._call.open(message, "opened", seconds, span)
        opened = reply.opened
        self._replica.require_same(opened)
        self._call.expect("opened.cached_tokens", opened.cached_tokens, 0, tokens)
        self._record.note_cached("target", opened.cached_tokens)
        self._waits.opened(tokens)
        owes = prompt.resumes or (carry is not None and len(carry.levels) > 0)
        without = owes or opened.dead_end
        if opened.HasField("token_id") == without:
            raise self._call.broken(f"opened.token_id must be {'unset' if without else 'set'}")
        if owes:
            return None
        self._call.expect("opened.token_id", opened.token_id, 0, self._vocab_size - 1)
        times, carry = times_of(self._call, opened), _carry_of(opened)
        return VerdictReply(
            place=0,
            num_accepted=0,
            next_token=opened.token_id,
            overlaps=(),
            times=times,
            carry=carry,
            feedback=self._feedback_of(opened),
            dead_end=opened.dead_end,
            log_probs=self._log_probs_of(opened.log_probs, not opened.dead_end),
            prompt_log_probs=self._prompt_log_probs_of(opened.prompt_log_probs, prompt),
        )

    async def verify(self, round_: int, position: int, drafted: DraftReply | None) -> VerdictReply:
        """See `TextTarget`."""
        with self._record.stage("verify_wait"):
            decided = await self._verify(round_, position, drafted)
        self._record.times.add_decided(decided.times, drafted.times if drafted else None)
        return decided

    async def _verify(self, round_: int, position: int, drafted: DraftReply | None) -> VerdictReply:
        step = target_pb2.VerifyStep(
            round=round_,
            position=position,
            draft=drafted.payload if drafted else None,
            # A plain round brings none: the drafter's states have a gap there.
            feedback=drafted is not None and self._feedback is not None,
        )
        message = target_pb2.SequenceRequest(verify=step)
        span = self._record.spans.call("verify", VERIFY_METHOD, self._call.address)
        reply = await self._call.ask(message, "verdict", self._waits.step(), span)
        self._waits.stepped()
        return self._decided(reply.verdict, round_, position, drafted)

    def ask_rounds(self, round_: int, position: int, count: int, size: DraftSize) -> None:
        """See `TextTarget`."""
        self._asked.extend([size] * count)
        step = target_pb2.RunStep(
            round=round_, position=position, rounds=count, gamma=size.gamma, max_nodes=size.nodes
        )
        traceparent = self._record.spans.traceparent
        self._call.tell(target_pb2.SequenceRequest(run=step, traceparent=traceparent), count)

    async def next_round(
        self, round_: int, position: int
    ) -> tuple[DraftReply | None, VerdictReply]:
        """See `TextTarget`."""
        span = self._record.spans.call("verify", VERIFY_METHOD, self._call.address)
        times = self._record.times
        with self._record.stage("verify_wait"), span or nullcontext():
            times.start_round()
            size, seconds = self._asked.popleft(), self._waits.step()
            begins = size.gamma > 0 and not self._drafting
            if begins:  # the target's own drafter takes the text in first
                seconds = max(seconds, self._waits.opening(position))
            reply = await self._call.hear("verdict", seconds)
            if not begins:
                self._waits.stepped()
            self._drafting |= begins
            drafted = self._drafted(reply.verdict, size)
            decided = self._decided(reply.verdict, round_, position, drafted)
        if span is not None:
            self._describe(span, round_, size, drafted, decided)
        times.add_decided(decided.times, drafted.times if drafted else None)
        times.drafted_tokens += len(drafted.token_ids) if drafted else 0
        return drafted, decided

    def _drafted(self, verdict: target_pb2.Verdict, size: DraftSize) -> DraftReply | None:
        """What the target drafted itself; None where it drafted nothing.

        Raises:
            PeerFailure: it is not what was asked for.
        """
        if not verdict.HasField("drafted"):
            return None
        draft, expect = verdict.drafted, self._call.expect
        token_ids = list(draft.token_ids)
        expect("len(drafted.token_ids)", len(token_ids), 0, size.nodes or size.gamma)
        expect("max(drafted.token_ids)", max(token_ids, default=0), 0, self._vocab_size - 1)
        parents = parents_of(self._call, draft, size)
        times = checked_times(self._call, verdict.draft_times)
        return DraftReply(token_ids, parents, None, 0, times, asked=size)

    def _describe(
        self,
        call: Span,
        round_: int,
        size: DraftSize,
        drafted: DraftReply | None,
        decided: VerdictReply,
    ) -> None:
        """The spans of a round that the target did by itself, one step after the other."""
        depth, nodes = (drafted.gamma, len(drafted.token_ids)) if drafted else (0, 0)
        round_of = {"tandem.round": round_, "tandem.depth": depth, "tandem.nodes": nodes}
        verify = {"tandem.place": decided.place, "tandem.accepted": decided.num_accepted}
        told = self._told | round_of
        began_ns = write_inside(call, "verify", decided.times, told | verify)
        if drafted is not None:
            told = told | {"tandem.gamma": size.gamma, "tandem.draft_bytes": 0}
            del told["tandem.verifier"]
            write_inside(call, "draft", drafted.times, told, began_ns)

    def _decided(
        self, verdict: target_pb2.Verdict, round_: int, position: int, drafted: DraftReply | None
    ) -> VerdictReply:
        """A verdict that fits what was asked.

        Raises:
            PeerFailure: it does not.
        """
        expect = self._call.expect
        self._replica.note_load(verdict.open_sequences)
        nodes, place = len(drafted.token_ids) if drafted else 0, verdict.place
        expect("verdict.round", verdict.round, round_, round_)
        expect("verdict.place", place, 0, nodes)
        accepted = len(drafted.tree.path_to(place)) if drafted else 0
        expect("verdict.num_accepted", verdict.num_accepted, accepted, accepted)
        next_token, dead_end = verdict.next_token_id, verdict.dead_end
        end = position + accepted + (not dead_end)
        expect("verdict.position", verdict.position, end, end)
        expect("verdict.next_token_id", next_token, 0, self._vocab_size - 1)
        overlaps = list(verdict.overlaps)
        expect("len(verdict.overlaps)", len(overlaps), nodes, nodes)
        if not all(0 <= overlap <= _MOST_OVERLAP for overlap in overlaps):
            raise self._call.broken("verdict.overlaps must be 0..1 each")
        times = times_of(self._call, verdict)
        carry, feedback = _carry_of(verdict), self._feedback_of(verdict)
        return VerdictReply(
            place=place,
            num_accepted=accepted,
            next_token=next_token,
            overlaps=overlaps,
            times=times,
            carry=carry,
            feedback=feedback,
            dead_end=dead_end,
            log_probs=self._log_probs_of(verdict.log_probs, end - position),
        )

    def _log_probs_of(self, message: common_pb2.LogProbs, count: int) -> Sequence[TokenLogProb]:
        """What is told of a number of tokens."""
        return log_probs_from(message, self._log_probs, (count, self._vocab_size), self._call)

    def _prompt_log_probs_of(
        self, message: common_pb2.LogProbs, prompt: Prompt
    ) -> Sequence[tuple[int, TokenLogProb | None]]:
        """The prompt's tokens with theirs, where they are wanted."""
        if self._log_probs is None or not self._log_probs.prompt:
            return ()
        told = self._log_probs_of(message, len(prompt.token_ids) - 1)
        return list(zip(prompt.token_ids, (None, *told), strict=True))

    def _feedback_of(self, answer: Any) -> common_pb2.Feedback | None:
        """What an answer brings for the drafter, which checks it."""
        if self._feedback is None or not answer.HasField("feedback"):
            return None
        feedback: common_pb2.Feedback = answer.feedback
        self._record.counts.feedback_bytes += bytes_of(feedback)
        return feedback


def _carry_of(message: target_pb2.OpenedSequence | target_pb2.Verdict) -> Any:
    return message.carry if message.HasField("carry") else None
