"""The target of a text, which may be lost on the way: another goes on from what was emitted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from tandem.errors import Exhausted, SequenceGivenBack, Unavailable
from tandem.peers.text.contracts import DraftReply, Prompt, TextPeers, TextTarget, VerdictReply
from tandem.peers.text.values import Generation
from tandem.rpc.status import notes_of
from tandem.speculation.request.log_probs import LogProbsWanted
from tandem.speculation.tree import DraftSize

_log = structlog.get_logger(__name__)


# With stop strings, at most about 30 ms of rounds are asked for ahead: enough to keep the target
# busy, and little is computed after the end. Any other end is known to the target, and a close
# ends a run between two rounds.
_AHEAD_NS = 30e6
_LEAST_AHEAD = 2
_PLAIN = DraftSize(0)
# A text that was given back as often waits until it has room to its end, and stays.
_MOST_GIVEN_BACK = 3


class TargetWithFailover:
    """Has drafts decided, as long as there is a target.

    A target that cannot be reached is left, and the next one opens with all that was emitted and
    the carry of the last verdict; so is one that has no slot when it opens. What the lost one
    may have decided was never seen: its round counts for nothing, and its number is not used
    again. A target that fails with anything else is not replaced, since that may be the draft's
    fault, and a draft that is left out for what it holds would bias the text.

    A target that gives the text back for its memory has decided nothing of the round: the same
    round, with the same draft, is decided where the text is opened again, as if it had stayed.

    Attributes:
        round: number of the last round.
        ahead: rounds that were asked for and have not come yet.

    Args:
        generation: the validated request.
        peers: makes sequences on targets.
        vocab_size: the target's.
        end_token_ids: that end the text.
        max_rounds: that a target takes ahead.
    """

    def __init__(
        self,
        generation: Generation,
        peers: TextPeers,
        vocab_size: int,
        end_token_ids: Sequence[int] = (),
        max_rounds: int = 1,
    ) -> None:
        self.round = generation.first_round
        self.ahead = 0
        self._end_token_ids = end_token_ids
        self._max_rounds = max_rounds
        self._round_ns = _AHEAD_NS
        self._generation = generation
        self._peers = peers
        self._vocab_size = vocab_size
        self._emitted = list(generation.received_ids)
        self._given_back = 0
        self._carry: Any = None
        self._target: TextTarget

    @property
    def token_ids(self) -> list[int]:
        """Of the text, prompt and emitted."""
        return [*self._generation.prompt_ids, *self._emitted]

    @property
    def prompt(self) -> Prompt:
        """What opens a sequence here and now."""
        generation, emitted = self._generation, self._emitted
        return Prompt(
            request_id=generation.request_id,
            token_ids=self.token_ids,
            sampling=generation.sampling,
            first_round=self.round,
            max_new_tokens=generation.stopping.max_new_tokens - len(emitted),
            target_vocab_size=self._vocab_size,
            end_token_ids=self._end_token_ids,
            verifier_options=generation.verifier_options,
            emitted_tokens=len(emitted),
            log_probs=self._log_probs,
            cache_salt=generation.cache_salt,
            learn=generation.learn,
            in_full=self._given_back >= _MOST_GIVEN_BACK,
        )

    @property
    def _log_probs(self) -> LogProbsWanted | None:
        """What is wanted from here on: those of the prompt come once."""
        wanted = self._generation.log_probs
        if wanted is None or not self._emitted:
            return wanted
        return replace(wanted, prompt=False)

    @property
    def length(self) -> int:
        """Tokens of the text, prompt and emitted."""
        return len(self._generation.prompt_ids) + len(self._emitted)

    def tell(self, emitted: list[int]) -> None:
        """Note what was emitted."""
        self._emitted += emitted

    async def begin(self) -> None:
        """Choose a target.

        Raises:
            Unavailable: there is none.
        """
        self._target = await self._peers.target()

    async def open(self) -> VerdictReply:
        """Prefill; the target draws the first token of it.

        Raises:
            TandemError: no target could be opened.
        """
        decided, _ = await self._open_any()
        assert decided is not None  # a token is drawn where there is no carry
        return self._keep(decided)

    async def decide(self, drafted: DraftReply | None) -> tuple[DraftReply | None, VerdictReply]:
        """Have a draft decided, in the next round.

        Returns:
            The draft that was decided, and the verdict. A target that had to be replaced draws
            a token from its prefill instead; no draft is decided then.

        Raises:
            TandemError: the target failed, and no other can go on.
        """

        async def verify() -> tuple[DraftReply | None, VerdictReply]:
            return drafted, await self._target.verify(self.round, self.length, drafted)

        self.round += 1
        try:
            decided_on, decided = await verify()
        except Unavailable as lost:
            decided_on, decided = await self._go_on_elsewhere(lost, verify)
        return decided_on, self._keep(decided)

    async def go_on(
        self, rounds: int, size: DraftSize = _PLAIN
    ) -> tuple[DraftReply | None, VerdictReply]:
        """The next round that the target does by itself; it need not be asked for each.

        Args:
            rounds: that are wanted at least, this one included. No more than that are asked for
                ahead.
            size: of the drafts that the target makes in those that are not asked for yet.

        Returns:
            What the target drafted, and the verdict.

        Raises:
            TandemError: the target failed, and no other can go on.
        """
        if not (self.ahead or size.gamma) and min(rounds, self._max_rounds) <= 1:
            return await self.decide(None)
        self._ask_ahead(rounds, size)
        self.round += 1
        self.ahead -= 1
        try:
            drafted, decided = await self._target.next_round(self.round, self.length)
        except Unavailable as lost:
            # Those after it may have been decided, and their numbers with them.
            if not isinstance(lost, SequenceGivenBack):
                self.round += self.ahead
            self.ahead = 0

            async def once() -> tuple[DraftReply | None, VerdictReply]:
                self._target.ask_rounds(self.round, self.length, 1, size)
                return await self._target.next_round(self.round, self.length)

            drafted, decided = await self._go_on_elsewhere(lost, once)
        else:
            spent = decided.times.total_ns + (drafted.times.total_ns if drafted else 0)
            self._round_ns = max(spent, 1)
        return drafted, self._keep(decided)

    def _ask_ahead(self, rounds: int, size: DraftSize) -> None:
        """Ask for rounds before those that were asked for are spent."""
        wanted = min(rounds, self._max_rounds)
        if self._generation.stopping.strings:
            wanted = min(wanted, max(round(_AHEAD_NS / self._round_ns), _LEAST_AHEAD))
        if self.ahead > wanted // 2:
            return
        first = (0, 0) if self.ahead else (self.round + 1, self.length)
        self._target.ask_rounds(*first, wanted - self.ahead, size)
        self.ahead = wanted

    async def _go_on_elsewhere(
        self,
        lost: Unavailable,
        owed: Callable[[], Awaitable[tuple[DraftReply | None, VerdictReply]]],
    ) -> tuple[DraftReply | None, VerdictReply]:
        """Open another target, which draws a token; or the same or another one, which does the
        round that was given back.

        Args:
            lost: why.
            owed: does the round that is needed in its place, where the carry modifies the next
                position or the text resumes.
        """
        while True:
            resumes = isinstance(lost, SequenceGivenBack)
            await self._replace(lost)
            if not resumes:
                self.round += 1
            opened, resumed = await self._open_any(resumes=resumes)
            if opened is not None:
                return None, opened
            if not resumed:
                self.round += 1
            try:
                return await owed()
            except Unavailable as again:
                lost = again

    async def _open_any(self, *, resumes: bool = False) -> tuple[VerdictReply | None, bool]:
        """Open the target, or the next one that can be.

        Args:
            resumes: the round that is on was given back. A target of an earlier release cannot
                resume, and draws a token in place of the round, under that one's number.

        Returns:
            What was drawn, and whether the text resumes.
        """
        rule = self._generation.rule
        sizes = self._generation.sizes
        gamma = sizes[0].gamma if rule.needs_every_draft else 0
        size = DraftSize(gamma, self._generation.most_nodes)
        while True:
            prompt, can = self.prompt, resumes and self._target.resumes
            if can:
                prompt = replace(prompt, first_round=self.round - 1, resumes=True)
            try:
                return await self._target.open(prompt, rule.name, size, self._carry), can
            except (Unavailable, Exhausted) as lost:  # nothing was emitted of it
                await self._replace(lost)

    async def _replace(self, lost: Unavailable | Exhausted) -> None:
        self._target.cancel()
        self._given_back += isinstance(lost, SequenceGivenBack)
        self._target = await self._peers.next_target(lost)
        # A text without room has not failed, and may ask again and again.
        waits = isinstance(lost, (Exhausted, SequenceGivenBack))
        log = _log.info if waits else _log.warning
        log("target replaced", error=str(lost), notes=notes_of(lost), round=self.round)

    def _keep(self, decided: VerdictReply) -> VerdictReply:
        self._carry = decided.carry
        return decided

    async def close(self) -> None:
        """End it in order."""
        await self._target.close()

    def cancel(self) -> None:
        """Abort it. Never waits; harmless before the beginning and after the end."""
        if hasattr(self, "_target"):
            self._target.cancel()
