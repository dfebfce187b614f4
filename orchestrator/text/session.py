"""One text: Algorithm 3 of arXiv 2403.10444 over two services.

open both; emit the token that the target draws from its prefill
until the text ends:
    draft gamma tokens after what was emitted
    have the target decide how many to keep, and what follows them
    emit those, all at once
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from orchestrator.text.emission import Emission
from orchestrator.text.target_failover import TargetWithFailover
from tandem.peers.text.contracts import (
    DraftReply,
    RoundForecast,
    SizeChoice,
    SizePolicy,
    VerdictReply,
)
from tandem.peers.text.drafter_failover import DrafterWithFailover
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Generation, Round
from tandem.speculation.tree import DraftSize
from tandem.telemetry.harmless import harmless


class Session:
    """Generates one text.

    Args:
        generation: the validated request.
        drafter: with a fresh drafter, or without any.
        target: with a fresh target.
        policy: chooses each draft's length.
        emission: makes rounds of verdicts.
        record: the text's.
        own_size: what the target drafts itself where a size is chosen; None where it does not.
        by_target: it does so from the beginning, and not only without drafters.
        spell: the texts of tokens, for spans; None keeps them out.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        drafter: DrafterWithFailover,
        target: TargetWithFailover,
        policy: SizePolicy,
        emission: Emission,
        record: TextRecord,
        own_size: Callable[[DraftSize], DraftSize] | None = None,
        by_target: bool = False,
        spell: Callable[[Sequence[int]], list[str]] | None = None,
    ) -> None:
        self._generation = generation
        self._drafter = drafter
        self._target = target
        self._policy = policy
        self._emission = emission
        self._record = record
        self._own_size = own_size
        self._sized: tuple[DraftSize | None, DraftSize] = None, DraftSize(0)  # asked for, own
        self._by_target = by_target
        self._outgrown: SizeChoice | None = None  # the choice where no draft has room any more
        self._spans = record.spans
        self._spell = spell if self._spans.context is not None else None

    async def rounds(self) -> AsyncGenerator[Round, None]:
        """The text, round by round. Both sequences are ended when the iterator is.

        Raises:
            TandemError: the targets failed, or a fixed draft length cannot be kept.
        """
        try:
            with self._spans.child("open"):
                await self._target.begin()
                if self._policy.begins_drafting and not self._by_target and self._room != 0:
                    await self._drafter.begin()
                decided = await self._target.open()
                self._describe_text(None, decided)
            yield self._emit(None, decided)
            while self._emission.finish_reason is None:
                with self._spans.child("round"):
                    self._spans.describe({"tandem.round": self._target.round + 1})  # if it fails
                    choice = self._choose()
                    drafted, decided = await self._round(choice)
                    self._policy.observe(drafted, decided)
                    self._describe(choice, drafted, decided)
                    emitted = self._emit(drafted, decided, choice.expected)
                yield emitted
            with self._spans.child("close"), self._record.stage("close_wait"):
                await asyncio.gather(self._target.close(), self._drafter.close())
        finally:
            self._policy.end()
            self._drafter.cancel()
            self._target.cancel()

    @property
    def _room(self) -> int | None:
        """Tokens that the text's drafter can still hold; None where it can hold all of the text, or
        the target drafts, which sees to that itself."""
        held = self._generation.drafter_holds
        return None if held is None or self._by_target else max(held - self._target.length, 0)

    def _choose(self) -> SizeChoice:
        """The next draft's size. Close to what the drafter can hold, drafts shrink as they do at a
        text's end; past it nothing is drafted, and all rounds that are left may be asked for at
        once. The text's length alone decides this."""
        left, room = self._emission.left, self._room
        if room is None:
            return self._policy.choose(left)
        if room:
            return self._policy.choose(min(left, room + 1))
        if self._outgrown is None:  # once: the policy learns that this text is plain from now on
            self._outgrown = self._policy.choose(1)
        return replace(self._outgrown, rounds=left)

    async def _round(self, choice: SizeChoice) -> tuple[DraftReply | None, VerdictReply]:
        """What was drafted, and the verdict; of a size that was chosen, or asked for before."""
        number, length = self._target.round + 1, self._target.length
        size, rounds = choice.size, min(choice.rounds, self._emission.left)
        if not self._by_target:
            if size.gamma:
                rounds = 1  # no more are asked for ahead, so that the draft's turn comes
            # Rounds that were asked for ahead come first.
            size = DraftSize(0) if self._target.ahead else size
            drafted = await self._drafter.draft(number, length, size, choice.ahead)
            self._by_target = self._own_size is not None and self._drafter.lost
            if size.gamma and not self._by_target:
                self._record.counts.undrafted_rounds += drafted is None
                return await self._target.decide(drafted)
        if self._own_size is None:
            size = DraftSize(0) if self._by_target else size  # the text is too long for the target
        elif self._by_target:
            sizes = self._generation.sizes  # the target itself drafts less at the text's end
            size = sizes[0] if len(sizes) == 1 else size
            if size is not self._sized[0]:
                self._sized = size, self._own_size(size)
            size = self._sized[1]
        return await self._target.go_on(rounds, size)

    def _emit(
        self,
        drafted: DraftReply | None,
        decided: VerdictReply,
        expected: RoundForecast | None = None,
    ) -> Round:
        """Commit a verdict: the kept tokens, and the one that follows them, if any may."""
        kept = drafted.path_to(decided.place) if drafted else []
        emitted = kept if decided.dead_end else [*kept, decided.next_token]
        self._target.tell(emitted)
        self._drafter.tell(emitted, decided.feedback)
        with self._record.stage("detokenize", span="detokenize"):
            return self._emission.commit(self._target.round, emitted, drafted, decided, expected)

    def _describe(
        self, choice: SizeChoice, drafted: DraftReply | None, decided: VerdictReply
    ) -> None:
        if self._spans.context is None:
            return
        expected = choice.expected
        self._spans.describe(
            {
                "tandem.round": self._target.round,  # a lost target's numbers are left out
                "tandem.gamma": choice.size.gamma,
                "tandem.depth": drafted.gamma if drafted else 0,
                "tandem.nodes": len(drafted.token_ids) if drafted else 0,
                "tandem.place": decided.place,
                "tandem.accepted": decided.num_accepted,
                "tandem.bonus": drafted is None or drafted.tree.is_leaf(decided.place),
                "tandem.verifier": self._generation.verifier,
            }
        )
        if expected is not None:
            self._spans.describe(
                {
                    "tandem.expected_tokens": round(expected.tokens, 3),
                    "tandem.expected_ms": round(expected.wall_ns / 1e6, 3),
                }
            )
        self._describe_text(drafted, decided)

    def _describe_text(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        if self._spell is None:
            return
        with harmless:
            tokens = drafted.kept_first(decided.place) if drafted else []
            spelled = self._spell([*tokens, *([] if decided.dead_end else [decided.next_token])])
            texts, following = spelled[: len(tokens)], "".join(spelled[len(tokens) :])
            self._spans.describe({"tandem.text.drafted": texts, "tandem.text.next": following})
