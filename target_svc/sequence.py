"""A sequence on the target: what a message must be, what is done about it, what is answered."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.v1 import common_pb2
from tandem.engine.answers import Decision
from tandem.engine.engine import Engine
from tandem.engine.scorer import Scorer
from tandem.errors import InvalidRequest, WrongState
from tandem.rpc import log_probs, messages
from tandem.rpc.feedback import FeedbackRoom, feedback_to, wanted_from
from tandem.rpc.streams.sequence import Progress, StepReply
from tandem.serving.sequence import EngineSequence, shaped_behind
from tandem.shaping.grammar import Grammars
from tandem.speculation.request.log_probs import LogProbsWanted
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.telemetry.stages import StageTimes
from tandem.telemetry.tracing.ids import SpanIds
from target_svc import round as rounds
from target_svc.drafts import OwnDrafts
from target_svc.messages import (
    carry_from,
    carry_to,
    rule_from,
)
from target_svc.overlap import Overlap, plain_round
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence
from target_svc.rules import BUILT_IN, Rules
from target_svc.run import Credit, RunRound, run


class VerifiedSequence(
    EngineSequence[target_pb2.SequenceRequest, target_pb2.SequenceResponse, TargetSequence]
):
    """One sequence of a target.

    Args:
        engine: runs its rounds.
        scorer: the model.
        info: limits that were announced.
        max_rounds: that a run may still have.
        grammars: for texts that keep to one.
        drafts: that the target can make itself, if it can.
        overlap: of the target's layers in rounds without a draft; None for whole passes.
        feedback_layers: whose hidden states it can give.
        probe_tokens: extra embeddings that it has for probes.
        rules: that it offers, by name.
        shares: whether sequences share computed prefixes.
    """

    many_answers = "run"

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        info: common_pb2.ModelInfo,
        max_rounds: int,
        grammars: Grammars,
        drafts: OwnDrafts | None = None,
        overlap: Overlap | None = None,
        feedback_layers: Sequence[int] = (),
        probe_tokens: int = 0,
        rules: Rules = BUILT_IN,
        shares: bool = True,
    ) -> None:
        super().__init__(engine, info, shares)
        self._info = info
        self._feedback_layers = feedback_layers
        self._probe_tokens = probe_tokens
        self._max_rounds = max_rounds
        self._grammars = grammars
        self._drafts = drafts
        self._overlap = overlap
        self._rules = rules
        self._credit: Credit | None = None  # of the run that is on, or was the last step
        self._running = self._ended = False
        self._early: list[target_pb2.RunStep] = []  # for a run that is about to begin
        self._scorer = scorer
        self._vocab_size = info.vocab_size
        self._most_nodes = info.max_nodes
        self._gamma = 0

    async def _open(
        self, message: target_pb2.SequenceRequest, traced: SpanIds | None
    ) -> StepReply[target_pb2.SequenceResponse]:
        request = message.open
        self._accept(request)
        sequence = self._sequence = self._sequence_from(request)
        sequence.shaped = await shaped_behind(
            request, sequence.request.sampling.shaping, self._vocab_size, self._grammars
        )
        self._gamma = request.gamma
        self._end = sequence.request.end
        prompt_tokens = len(sequence.token_ids)
        steps = rounds.open_(self._scorer, sequence, request.first_round, resumes=request.resumes)
        room = self._room(
            prompt_tokens,
            in_full=not request.may_be_given_back or sequence.request.rule.needs_every_draft,
            first=request.goes_first,
        )
        decision, times = await self._engine.open(sequence, steps, room, self.request_id, traced)
        self._progress = Progress(sequence.length, request.first_round)
        dead_end = self._ended = decision is not None and decision.dead_end
        opened = target_pb2.OpenedSequence(
            token_id=None if decision is None or dead_end else decision.next_token,
            # Where no token was drawn, the carry is still the one that the request brought.
            carry=request.carry if decision is None else carry_to(decision.levels),
            times=messages.times_to(times),
            open_sequences=self._engine.admission.open_sequences,
            incarnation=self._incarnation,
            dead_end=dead_end,
            log_probs=None if decision is None else log_probs.log_probs_to(decision.log_probs),
            prompt_log_probs=log_probs.log_probs_to(sequence.prompt_log_probs),
            cached_tokens=rounds.cache_of(sequence).found,
        )
        sequence.prompt_log_probs = []
        if decision is not None and (feedback := self._feedback_of(decision)) is not None:
            opened.feedback.CopyFrom(feedback)
        return StepReply(
            target_pb2.SequenceResponse(opened=opened),
            "prefill",
            times,
            {
                "tandem.prompt_tokens": prompt_tokens,
                "tandem.cached_tokens": opened.cached_tokens,
                "tandem.batch_size": times.batch_size,
            },
        )

    def _sequence_from(self, request: target_pb2.OpenSequence) -> TargetSequence:
        """A checked request as a sequence."""
        token_ids = messages.tokens_from(
            "open.token_ids", request.token_ids, self._vocab_size, self._max_length
        )
        rule = rule_from(request, self._rules)
        if request.max_new_tokens < 1:
            raise InvalidRequest("open.max_new_tokens must be at least 1")
        if request.resumes and not request.emitted_tokens:
            raise InvalidRequest("open.resumes needs emitted_tokens: a text begins with a token")
        if len(token_ids) + request.max_new_tokens > self._max_length:
            raise InvalidRequest(
                f"open.max_new_tokens: {len(token_ids)} prompt tokens and"
                f" {request.max_new_tokens} new ones exceed the target's {self._max_length}"
            )
        if rule.needs_every_draft and not 1 <= request.gamma <= self._max_gamma:
            raise InvalidRequest(f"open.gamma must be 1..{self._max_gamma} for {rule.name}")
        if not rule.needs_every_draft and request.gamma:
            raise InvalidRequest(f"open.gamma must be 0 for {rule.name}")
        self._check_nodes(request.max_nodes)
        carry = carry_from(request.carry, rule, request.gamma)
        sampling = messages.sampling_from(request.sampling)
        if len(request.end_token_ids) > messages.MOST_ENDS:
            raise InvalidRequest(f"open.end_token_ids may hold {messages.MOST_ENDS} ids")
        room = FeedbackRoom(
            layers=self._feedback_layers,
            hidden_size=self._info.hidden_size,
            message_bytes=self._info.max_message_bytes,
            prompt_tokens=len(token_ids),
            places=1 + (request.max_nodes or self._max_gamma),
        )
        asked = TargetRequest(
            sampling=sampling,
            rule=rule,
            nodes=request.max_nodes,
            end=len(token_ids) + request.max_new_tokens,
            end_token_ids=frozenset(request.end_token_ids),
            feedback=wanted_from(request.feedback, room),
            log_probs=self._log_probs_from(request, len(token_ids)),
            salt=self._salt,
        )
        drafts = self._drafts
        own = None if drafts is None else OwnDrafting(list(token_ids), drafts.feedback)
        return TargetSequence(token_ids, asked, carry, own)

    def _log_probs_from(
        self, request: target_pb2.OpenSequence, tokens: int
    ) -> LogProbsWanted | None:
        if not request.HasField("log_probs"):
            return None
        wanted = log_probs.wanted_from(request.log_probs)
        if wanted.prompt and tokens * wanted.bytes_each > self._info.max_message_bytes:
            raise InvalidRequest(
                f"log_probs.prompt: those of {tokens} tokens do not fit into a message of"
                f" {self._info.max_message_bytes} bytes"
            )
        return wanted

    def _check_nodes(self, max_nodes: int) -> None:
        if max_nodes > self._most_nodes:
            raise InvalidRequest(
                f"open.max_nodes must be 0..{self._most_nodes}, got {max_nodes}"
                + ("" if self._most_nodes else ": this target's model takes chains alone")
            )

    async def _step(
        self, message: target_pb2.SequenceRequest, traced: SpanIds | None
    ) -> StepReply[target_pb2.SequenceResponse] | None:
        if message.HasField("run"):
            await self._run(message.run, traced)
            return None
        request, sequence = message.verify, self._sequence
        asked = sequence.request
        self._credit = None
        self._check_goes_on()
        self._progress.check(request.round, request.position)
        draft = messages.draft_from(
            *(request.draft, self._vocab_size, self._max_gamma, asked.nodes),
            self._probe_tokens,
        )
        if fault := draft.misfit(asked.rule.takes):
            raise InvalidRequest(fault)
        self._check_room()
        self._check_depth(draft.depth)
        if request.feedback and asked.feedback is None:
            raise InvalidRequest("verify.feedback must be unset: open asked for none")
        wanted = asked.feedback if request.feedback else None
        if draft or draft.probes:
            steps = rounds.verify(self._scorer, sequence, request.round, draft, wanted)
        else:
            steps = plain_round(self._scorer, sequence, request.round, wanted, self._overlap)
        decision, times = await self._engine.run(sequence, steps, self.request_id, traced)
        if sequence.flight is not None:
            sequence.flight.last = None  # of a pass that is over: it would be held
        self._ended = decision.dead_end
        answer = self._verdict(request.round, sequence.length, decision, times)
        return StepReply(
            answer,
            "verify",
            times,
            {
                "tandem.round": request.round,
                "tandem.depth": draft.depth,
                "tandem.nodes": len(draft),
                "tandem.probes": len(draft.probes),
                "tandem.place": decision.place,
                "tandem.accepted": decision.num_accepted,
                "tandem.verifier": asked.rule.name,
                "tandem.batch_size": times.batch_size,
            },
        )

    def _verdict(
        self, round_: int, length: int, decision: Decision, times: StageTimes
    ) -> target_pb2.SequenceResponse:
        """A round's answer; the sequence is after it."""
        self._progress.length, self._progress.last_round = length, round_
        # Written in place: each message that is made apart is copied into the one around it.
        answer = target_pb2.SequenceResponse()
        verdict = answer.verdict
        verdict.round, verdict.position = round_, length
        verdict.place, verdict.num_accepted = decision.place, decision.num_accepted
        if decision.dead_end:
            verdict.dead_end = True
        else:
            verdict.next_token_id = decision.next_token
        verdict.overlaps.extend(decision.overlaps)
        verdict.open_sequences = self._engine.admission.open_sequences
        messages.write_times(verdict.times, times)
        if (carry := carry_to(decision.levels)) is not None:
            verdict.carry.CopyFrom(carry)
        if (told := log_probs.log_probs_to(decision.log_probs)) is not None:
            verdict.log_probs.CopyFrom(told)
        if (feedback := self._feedback_of(decision)) is not None:
            verdict.feedback.CopyFrom(feedback)
        return answer

    def _feedback_of(self, decision: Decision) -> common_pb2.Feedback | None:
        """What a verdict tells the text's drafter."""
        wanted = self._sequence.request.feedback
        if wanted is None or decision.feedback is None:
            return None
        return feedback_to(decision.feedback, wanted)

    async def _run(self, request: target_pb2.RunStep, traced: SpanIds | None) -> None:
        """Rounds by the engine alone, as long as some are granted."""
        credit = self._credit = self._begun(request) if request.round else self._credit
        if credit is None:
            raise WrongState("run.round may be 0 only after a run")
        early, self._early = self._early, []
        for granted in (request, *early):
            self._grant(credit, granted)
        self._running = True
        try:
            while credit.left and not self._ended:
                steps = run(self._scorer, self._sequence, credit, self._drafts, self._overlap)
                await self._engine.run(
                    self._sequence, steps, self.request_id, traced, self._say_round
                )
        finally:
            self._running = False

    def more(self, message: target_pb2.SequenceRequest, amid: target_pb2.SequenceRequest) -> None:
        """Take more rounds of a run."""
        if not message.HasField("run") or not amid.HasField("run"):
            return super().more(message, amid)
        if message.run.round:
            raise WrongState("run.round must be 0 while a run is on")
        if self._running and self._credit is not None:
            self._grant(self._credit, message.run)
        else:  # it is about to begin
            self._early.append(message.run)

    def _begun(self, request: target_pb2.RunStep) -> Credit:
        """The credit of a run that begins, none yet."""
        self._check_goes_on()
        self._progress.check(request.round, request.position)
        self._check_room()
        return Credit(request.round - 1)

    def _grant(self, credit: Credit, request: target_pb2.RunStep) -> None:
        """Let a run have more rounds, unless the text has ended while they were on their way."""
        if self._ended:
            return
        left = self._max_rounds - credit.left
        if not 1 <= request.rounds <= left:
            raise InvalidRequest(
                f"run.rounds must be 1..{left}, got {request.rounds}: a run may have"
                f" {self._max_rounds} ahead"
            )
        credit.grant(request.rounds, self._size(request))

    def _size(self, request: target_pb2.RunStep) -> DraftSize:
        """What the target drafts in the rounds of a request.

        Raises:
            InvalidRequest: it cannot, or the rule does not take it.
        """
        asked, gamma, nodes = self._sequence.request, request.gamma, request.max_nodes
        rule = asked.rule
        if self._gamma and gamma != self._gamma:
            raise InvalidRequest(
                f"run.gamma must be {self._gamma}, got {gamma}: {rule.name} needs a draft of one"
                " length in each round"
            )
        if not gamma:
            return DraftSize(0)
        if self._drafts is None:
            raise InvalidRequest("run.gamma must be 0: this target drafts nothing")
        traits, info = self._drafts.drafter.traits, self._drafts.info
        if gamma > info.max_gamma:
            raise InvalidRequest(f"run.gamma must be 0..{info.max_gamma}, got {gamma}")
        if not rule.suits(traits.shape, pure=traits.pure):
            raise InvalidRequest(
                f"run.gamma must be 0: {rule.name} does not take the drafts of {info.drafter}"
            )
        longest = info.held_length if rule.needs_every_draft else info.max_length
        if self._end > longest:
            raise InvalidRequest(
                f"run.gamma must be 0: the text may have {self._end} tokens, and this target drafts"
                f" for {longest}"
            )
        if self._progress.length < 2:
            raise InvalidRequest("run.gamma must be 0 after a single token")
        room = asked.nodes - info.probes
        if info.probes and room < (nodes or gamma):
            raise InvalidRequest(
                f"run.gamma must be 0: drafts of {info.drafter} have up to {info.probes} probes,"
                f" and open.max_nodes is {asked.nodes}"
            )
        most = min(room, info.max_nodes)
        if not bool(info.max_nodes) <= nodes <= most:
            raise InvalidRequest(
                f"run.max_nodes must be {bool(info.max_nodes):d}..{most}, got {nodes}"
            )
        return DraftSize(gamma, nodes)

    def _say_round(self, done: RunRound, times: StageTimes) -> None:
        """Answer with a round of a run."""
        self._ended |= done.ended
        answer = self._verdict(done.round, done.length, done.decision, times)
        verdict = answer.verdict
        verdict.last = done.last
        if done.draft_times is not None:
            drafted, draft = verdict.drafted, done.decision.draft
            drafted.token_ids.extend(draft.token_ids)
            drafted.parents.extend(draft.parents or ())
            messages.write_times(verdict.draft_times, done.draft_times)
        self.say(answer)

    def _check_goes_on(self) -> None:
        if self._ended:
            raise WrongState("the text has ended")

    def _check_room(self) -> None:
        if self._end <= self._progress.length:
            raise WrongState("all of max_new_tokens have been emitted")

    def _check_depth(self, gamma: int) -> None:
        left = self._end - self._progress.length
        if gamma > left:
            raise InvalidRequest(
                f"draft.token_ids holds a path of {gamma} tokens; max_new_tokens leaves {left}"
            )
        if self._gamma and gamma != min(self._gamma, left):
            raise InvalidRequest(
                f"draft.token_ids holds {gamma} tokens; {self._sequence.request.rule.name} needs"
                f" {min(self._gamma, left)} (its fixed gamma, or what is left)"
            )
