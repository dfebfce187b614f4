"""A text's sequence on a drafter, over gRPC: what is asked, and that the answer fits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import ShortDraft
from tandem.peers.grpc.calls import MOST_STAGE_NS, CountingOn, parents_of, times_of
from tandem.peers.grpc.deadlines import Waits
from tandem.peers.text.contracts import AheadWay, DraftReply, News, Prompt
from tandem.peers.text.record import TextRecord
from tandem.rpc import messages
from tandem.rpc.messages import AROUND_BYTES
from tandem.rpc.streams.call import SequenceCall, recorded
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes

DRAFT_METHOD = "tandem.drafter.v1.DrafterService/Draft"
# Spans have no larger number.
_MOST_VERSION = 2**63 - 1
# In the order of drafter.proto's Outcome, from 1 on.
_PREPARED = {
    drafter_pb2.DraftedStep.OUTCOME_HIT: PreparedOutcome.HIT,
    drafter_pb2.DraftedStep.OUTCOME_LATE: PreparedOutcome.LATE,
    drafter_pb2.DraftedStep.OUTCOME_MISS: PreparedOutcome.MISS,
}


class _Sent(NamedTuple):
    """A draft that was sent ahead, and how many had been prepared with it."""

    draft: common_pb2.Draft
    prepared: int


class DraftCall:
    """A sequence on a drafter.

    Args:
        call: carries it.
        waits: its deadlines.
        record: the text's, which books each exchange.
        max_bytes: that the target takes in a message.
        replica: that it is for.
    """

    def __init__(
        self,
        call: SequenceCall[drafter_pb2.SequenceRequest, drafter_pb2.SequenceResponse],
        waits: Waits,
        record: TextRecord,
        max_bytes: int,
        replica: CountingOn,
    ) -> None:
        self._call = call
        self._replica = replica
        self._max_bytes = max_bytes
        self._waits = waits
        self._record = record
        self._vocab_size = 0
        # Of the last step: what its second answer is compared with; None where it has none.
        self._sending: drafter_pb2.DraftStep | None = None
        self.close = call.close
        self.cancel = call.cancel

    async def open(self, prompt: Prompt) -> StageTimes:
        """See `TextDrafter`. No stage is booked: the text waits for the target's opening only."""
        self._vocab_size = prompt.target_vocab_size
        request = drafter_pb2.OpenSequence(
            request_id=prompt.request_id,
            token_ids=prompt.token_ids,
            sampling=messages.sampling_to(prompt.sampling),
            target_vocab_size=prompt.target_vocab_size,
            first_round=prompt.first_round,
            max_new_tokens=prompt.max_new_tokens,
            fingerprint=self._replica.fingerprint,
            emitted_tokens=prompt.emitted_tokens,
            cache_salt=prompt.cache_salt,
            may_be_given_back=not prompt.in_full,
            learn=None if prompt.learn else False,
        )
        message = drafter_pb2.SequenceRequest(open=request)
        # It may outlast the target's opening, and is beside it: a part of the text.
        span = self._record.spans.call("prefill", DRAFT_METHOD, self._call.address, of_text=True)
        tokens = len(prompt.token_ids)
        seconds = self._waits.opening(tokens, usual=prompt.usual)
        reply = await self._call.open(message, "opened", seconds, span)
        self._replica.require_same(reply.opened)
        self._call.expect("opened.cached_tokens", reply.opened.cached_tokens, 0, tokens)
        version = reply.opened.weights_version
        self._call.expect("opened.weights_version", version, 0, _MOST_VERSION)
        self._record.note_cached("drafter", reply.opened.cached_tokens)
        self._record.counts.weights_version = version
        self._waits.opened(tokens)
        times = times_of(self._call, reply.opened)
        self._record.times.add_prefill("drafter", times)
        return times

    async def draft(
        self,
        round_: int,
        position: int,
        news: News,
        size: DraftSize,
        needs_every_draft: bool,
        ahead: AheadWay = AheadWay.NOTHING,
    ) -> DraftReply:
        """See `TextDrafter`."""
        with self._record.stage("draft_wait"):
            drafted = await self._draft(round_, position, news, size, needs_every_draft, ahead)
        self._record.times.drafted_tokens += len(drafted.token_ids)
        return drafted

    async def _draft(
        self,
        round_: int,
        position: int,
        news: News,
        size: DraftSize,
        needs_every_draft: bool,
        ahead: AheadWay,
    ) -> DraftReply:
        gamma = size.gamma
        if not self._replica.prepares:
            ahead = AheadWay.NOTHING
        step = drafter_pb2.DraftStep(
            round=round_,
            position=position,
            new_token_ids=news.token_ids,
            gamma=gamma,
            max_nodes=size.nodes,
            feedback=news.feedback if self._replica.feedback.asks else (),
            ahead=ahead > AheadWay.NOTHING,
            send_ahead=ahead is AheadWay.SENT,
        )
        sent = await self._sent(step) if self._sending is not None and self._call.heard() else None
        outcome: PreparedOutcome | None = PreparedOutcome.HIT
        if sent is not None:
            step.taken = True
            self._call.tell(drafter_pb2.SequenceRequest(draft=step), int(step.send_ahead))
            self._record.note_prepared(PreparedOutcome.HIT, sent.prepared)
            draft, times = sent.draft, StageTimes()
        else:
            drafted = await self._ask(step)
            draft, times = drafted.draft, times_of(self._call, drafted)
            outcome = self._note_prepared(drafted)
        self._sending = step if step.send_ahead else None
        checked = self._checked(draft, size, needs_every_draft, times)
        return replace(checked, ahead=ahead, prepared=outcome)

    async def _sent(self, step: drafter_pb2.DraftStep) -> _Sent | None:
        """The draft of a step among those that were sent ahead, which have come; None if it is not
        among them.

        Raises:
            PeerFailure: they are not what they should be.
        """
        before, self._sending = self._sending, None
        assert before is not None
        prepared = (await self._call.hear("prepared", self._waits.step())).prepared
        expect, most = self._call.expect, before.max_nodes or before.gamma
        expect("prepared.round", prepared.round, before.round, before.round)
        found = {}
        for each in prepared.drafts:
            tokens = tuple(each.new_token_ids)
            expect("len(prepared.drafts.new_token_ids)", len(tokens), 1, most + 1)
            expect("max(prepared.drafts.new_token_ids)", max(tokens), 0, self._vocab_size - 1)
            found[tokens] = each.draft
        count = len(prepared.drafts)
        expect("outcomes of prepared.drafts", len(found), count, count)
        self._replica.note_load(prepared.open_sequences)
        # What was sent ahead was drafted without the feedback that came since, whatever that is;
        # no draft changes by what is for learning.
        suits = self._replica.learns or not step.feedback
        follows = suits and step.round == before.round + 1
        same = (step.gamma, step.max_nodes) == (before.gamma, before.max_nodes)
        draft = found.get(tuple(step.new_token_ids)) if follows and same else None
        return None if draft is None else _Sent(draft, prepared.prepared)

    async def _ask(self, step: drafter_pb2.DraftStep) -> drafter_pb2.DraftedStep:
        """The answer to a step."""
        message = drafter_pb2.SequenceRequest(draft=step)
        span = self._record.spans.call("draft", DRAFT_METHOD, self._call.address)
        with recorded(span, message):
            until = time.monotonic() + self._waits.step()
            self._call.tell(message, 1 + step.send_ahead)
            if self._sending is not None:  # too late for what was sent ahead: it comes first
                await self._call.hear("prepared", until - time.monotonic())
            drafted = (await self._call.hear("drafted", until - time.monotonic())).drafted
        self._waits.stepped()
        expect = self._call.expect
        self._replica.note_load(drafted.open_sequences)
        expect("drafted.round", drafted.round, step.round, step.round)
        end = step.position + len(step.new_token_ids)
        expect("drafted.position", drafted.position, end, end)
        return drafted

    def _checked(
        self, draft: common_pb2.Draft, size: DraftSize, needs_every_draft: bool, times: StageTimes
    ) -> DraftReply:
        """A draft of the size and shape that were asked for."""
        gamma, expect = size.gamma, self._call.expect
        most = size.nodes or gamma
        expect("len(draft.token_ids)", len(draft.token_ids), 0, most)
        token_ids = list(draft.token_ids)
        if needs_every_draft and len(token_ids) < gamma:
            raise self._short(len(token_ids), gamma)
        parents = parents_of(self._call, draft, size)
        weight = self._check(draft, token_ids)
        return DraftReply(token_ids, parents, draft, weight, times)

    def _note_prepared(self, drafted: drafter_pb2.DraftedStep) -> PreparedOutcome | None:
        """Count what became of prepared drafts; see `DraftReply.prepared`.

        Raises:
            PeerFailure: it cannot be that.
        """
        if not drafted.HasField("prepared"):
            return None
        prepared, expect = drafted.prepared, self._call.expect
        expect("drafted.prepared.outcome", prepared.outcome, 1, len(_PREPARED))
        expect("drafted.prepared.ready_ns", prepared.ready_ns, 0, MOST_STAGE_NS)
        outcome = _PREPARED[prepared.outcome]
        self._record.note_prepared(outcome, prepared.drafts, prepared.ready_ns)
        return outcome

    def _short(self, count: int, gamma: int) -> ShortDraft:
        error = ShortDraft(
            f"the drafter drafted {count} of {gamma} tokens, and this text's verifier needs every"
            " draft at full length; use another verifier"
        )
        error.add_note(f"drafter {self._call.address}: it says that its drafts are pure")
        return error

    def _check(self, draft: common_pb2.Draft, token_ids: list[int]) -> int:
        """Refuse a draft of the wrong shape, while the text can still go on without it.

        Its rows stay unread: the target checks them.

        Returns:
            Bytes of the rows.
        """
        count, expect, rows = len(token_ids), self._call.expect, draft.rows
        probes, hung = len(draft.probes.token_ids), len(draft.probes.parents)
        expect("len(draft.probes.token_ids)", probes, 0, self._replica.feedback.probes)
        expect("len(draft.probes.parents)", hung, probes, probes)
        expect("max(draft.token_ids)", max(token_ids, default=0), 0, self._vocab_size - 1)
        sizes, row_of = rows.sizes, draft.row_of
        if row_of:
            expect("len(draft.row_of)", len(row_of), count, count)
            expect("max(draft.row_of)", max(row_of), 0, (len(sizes) or count) - 1)
        if sizes:
            expect("len(draft.rows.sizes)", len(sizes), 1 if row_of else count, count)
            entries = sum(sizes)
            expect("len(draft.rows.ids)", len(rows.ids), 4 * entries, 4 * entries)
            expect("len(draft.rows.weights)", len(rows.weights), 2 * entries, 2 * entries)
            expect("bytes of the draft", 6 * entries, 0, self._max_bytes - AROUND_BYTES)
            return 6 * entries
        expect("len(draft.rows.ids)", len(rows.ids) + len(rows.weights), 0, 0)
        return 0
