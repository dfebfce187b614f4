"""One text: Algorithm 3 of arXiv 2403.10444 over two services.

open both; emit the token that the target draws from its prefill
until the text ends:
    draft gamma tokens behind what was emitted
    have the target decide how many to keep, and what follows them
    emit those, all at once
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from orchestrator.drafting import Drafting
from orchestrator.emission import Emission
from orchestrator.ledger import Ledger
from orchestrator.peers import Decided, Drafted, Peers, Policy, Prompt
from orchestrator.request import Generation
from orchestrator.round import Round
from orchestrator.spans import TextSpans


class Session:
    """Generates one text.

    Args:
        generation: the validated request.
        peers: makes its sequence on a target.
        drafting: with a fresh drafter, or without any.
        policy: chooses each draft's length.
        emission: makes rounds of verdicts.
        target_vocab_size: bounds drafted and emitted ids.
        ledger: books what takes time here.
        spans: the text's.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        peers: Peers,
        drafting: Drafting,
        policy: Policy,
        emission: Emission,
        target_vocab_size: int,
        ledger: Ledger,
        spans: TextSpans,
    ) -> None:
        self._generation = generation
        self._target = peers.target()
        self._drafting = drafting
        self._policy = policy
        self._emission = emission
        self._target_vocab_size = target_vocab_size
        self._ledger = ledger
        self._spans = spans
        self._round = generation.first_round
        self._length = len(generation.prompt_ids)

    async def rounds(self) -> AsyncGenerator[Round, None]:
        """The text, round by round. Both sequences are ended when the iterator is.

        Raises:
            TandemError: the target failed, or a fixed draft length cannot be kept.
        """
        try:
            with self._spans.child("open"):
                decided = await self._open()
            yield self._emit(None, decided)
            while self._emission.finish_reason is None:
                self._round += 1
                with self._spans.child("round"):
                    self._spans.describe({"tandem.round": self._round})
                    gamma = self._policy.choose(self._emission.left)
                    drafted = await self._drafting.draft(self._round, self._length, gamma)
                    decided = await self._target.verify(self._round, self._length, drafted)
                    self._policy.observe(drafted, decided)
                    self._describe(drafted, decided)
                    emitted = self._emit(drafted, decided)
                yield emitted
            with self._ledger.stage("close_wait"):
                await asyncio.gather(self._target.close(), self._drafting.close())
        finally:
            self._drafting.cancel()
            self._target.cancel()

    async def _open(self) -> Decided:
        """Prefill both in parallel; the target's prefill gives the first token."""
        generation = self._generation
        prompt = Prompt(
            generation.request_id,
            generation.prompt_ids,
            generation.sampling,
            generation.first_round,
            generation.stopping.max_new_tokens,
            self._target_vocab_size,
        )
        self._drafting.begin(prompt)
        rule = generation.rule
        decided = await self._target.open(
            prompt, rule.name, generation.gamma if rule.fixed_gamma else 0, None
        )
        assert decided is not None  # a token is drawn where there is no carry
        return decided

    def _emit(self, drafted: Drafted | None, decided: Decided) -> Round:
        """Commit a verdict: the kept tokens, and the one that follows them."""
        kept = list(drafted.token_ids[: decided.num_accepted]) if drafted else []
        emitted = [*kept, decided.next_token]
        self._length += len(emitted)
        self._drafting.tell(emitted)
        with self._spans.child("detokenize"), self._ledger.stage("detokenize"):
            return self._emission.commit(self._round, emitted, drafted, decided)

    def _describe(self, drafted: Drafted | None, decided: Decided) -> None:
        self._spans.describe(
            {
                "tandem.gamma": len(drafted.token_ids) if drafted else 0,
                "tandem.accepted": decided.num_accepted,
                "tandem.verifier": self._generation.verifier,
            }
        )
