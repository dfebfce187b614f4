"""One of vLLM's texts, and its sequence on a drafter."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace

from orchestrator.replicas.drafter_of_text import DrafterOfText
from orchestrator.text.contracts import Drafted, DraftSize, News, Prompt, TextDrafter
from orchestrator.text.drafter_failover import DrafterWithFailover
from orchestrator.text.record import TextRecord
from tandem.errors import InvalidRequest, PeerFailure, TandemError
from tandem.rpc import messages
from tandem.speculation.draft import Draft, faults
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import NO_SHAPING
from tandem.telemetry.stages import StageTimes
from tandem_vllm.pool import DrafterPool


@dataclass(frozen=True)
class RemoteDraft:
    """A draft, and what its verification is keyed by.

    Attributes:
        seed: of the text.
        round: number of the draft.
        draft: a chain.
    """

    seed: int
    round: int
    draft: Draft


@dataclass(frozen=True)
class Opening:
    """A text that begins.

    Attributes:
        name: vLLM's of the request.
        token_ids: of the text so far.
        sampling: of its drafts.
        most_tokens: that it may have behind these.
        emitted_tokens: how many of `token_ids`, the last ones, were generated.
        traceparent: of the request's caller; empty for none.
    """

    name: str
    token_ids: list[int]
    sampling: Sampling
    most_tokens: int
    emitted_tokens: int = 0
    traceparent: str = ""


class RemoteText:
    """Asks for a text's drafts, one at a time.

    Args:
        pool: of drafters.
        opening: the text.
        vocab_size: of vLLM's logits.
        reserve: tokens to reserve on a drafter, see `RESERVE_TOKENS`.
        record: books and traces what is asked.
    """

    def __init__(
        self,
        pool: DrafterPool,
        opening: Opening,
        vocab_size: int,
        reserve: int,
        record: TextRecord,
    ) -> None:
        self.record = record
        self._pool = pool
        self._opening = opening
        self._vocab_size = vocab_size
        self._sampling = opening.sampling
        self._tokens = list(opening.token_ids)
        self._prompt_tokens = len(self._tokens) - opening.emitted_tokens
        self._end = len(self._tokens) + opening.most_tokens
        self._reserve = reserve
        self._told = len(self._tokens)
        self._round = 0
        self._asked: asyncio.Task[RemoteDraft | None] | None = None
        self._drafting = DrafterOfText(pool.deadlines, record)
        self._drafter = self._opened()

    def _opened(self) -> DrafterWithFailover:
        """A drafter that opens, in the background."""
        self._reserved = sys.maxsize  # until it is known
        drafter = DrafterWithFailover(
            self._sequence,
            self._prompt,
            self.record,
            lambda: 0.0,  # none is waited for: rounds go on without
            "",
            self._note_lost,
            self._drafting.let_go,
        )
        drafter.begin(late=True)
        return drafter

    def _note_lost(self, error: TandemError | None) -> None:
        if self._sampling.shaping and isinstance(error, PeerFailure):
            # It may not know what shapes this text, such as a schema's keyword: none of its faults.
            self._sampling = replace(self._sampling, shaping=NO_SHAPING)
            return
        self._drafting.note_lost(error)

    def _sequence(self) -> TextDrafter | None:
        limits = self._pool.limits
        if limits is None or self._room(limits.max_length) < 1:
            return None
        most = limits.max_message_bytes
        call = self._drafting.begin(self._pool.pick(), None, most, most)
        return None if call is None else _Checked(call, self._vocab_size, limits.max_gamma)

    def _room(self, max_length: int) -> int:
        """Tokens to reserve behind those that the drafter is told of."""
        return min(self._reserve, self._end - self._told, max_length - self._told)

    def _prompt(self) -> Prompt:
        limits = self._pool.limits
        assert limits is not None
        room = self._room(limits.max_length)
        self._reserved = self._told + room
        return Prompt(
            self._opening.name,
            self._tokens[: self._told],
            self._sampling,
            self._round,
            room,
            self._vocab_size,
            emitted_tokens=self._told - self._prompt_tokens,
        )

    def ask(self, token_ids: list[int], gamma: int) -> asyncio.Task[RemoteDraft | None] | None:
        """Have a draft made behind the text; None while the last one is still being made.

        Args:
            token_ids: of the text since the last call.
            gamma: the longest draft.
        """
        self._tokens += token_ids
        if self._asked is not None and not self._asked.done():
            return None
        self._round += 1
        self._asked = asyncio.create_task(self._draft(gamma))
        return self._asked

    async def _draft(self, gamma: int) -> RemoteDraft | None:
        limits = self._pool.limits
        if limits is None:
            return None
        news, self._told = self._tokens[self._told :], len(self._tokens)
        self._drafter.tell(news)
        gamma = min(gamma, limits.max_gamma, self._end - self._told)
        left = self._reserved - self._told
        if left < gamma and self._reserved < min(self._end, limits.max_length):
            await self._open_anew()
            return None
        gamma = max(min(gamma, left), 0)
        drafted = await self._drafter.draft(self._round, self._told, DraftSize(gamma))
        if drafted is None or not drafted.token_ids:
            return None
        return RemoteDraft(self._opening.sampling.seed, self._round, drafted.payload)

    async def _open_anew(self) -> None:
        """Reserve more, behind the text as it is now."""
        self._reserve *= 2
        await self._drafter.close()
        self._drafting.let_go()
        self._drafter = self._opened()

    def end(self) -> None:
        """The text is over."""
        if self._asked is not None:
            self._asked.cancel()
        self._drafter.cancel()
        self._drafting.let_go()
        self.record.end()


class _Checked:
    """A sequence whose drafts are read here, since no target will.

    Args:
        sequence: on a drafter.
        vocab_size: of vLLM's logits.
        max_gamma: the longest draft.
    """

    def __init__(self, sequence: TextDrafter, vocab_size: int, max_gamma: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._max_gamma = max_gamma
        self.close = sequence.close
        self.cancel = sequence.cancel

    async def open(self, prompt: Prompt) -> StageTimes:
        """See `TextDrafter`."""
        return await self._sequence.open(prompt)

    async def draft(
        self, round_: int, position: int, news: News, size: DraftSize, exact: bool
    ) -> Drafted:
        """See `TextDrafter`.

        Raises:
            PeerFailure: the draft is none.
        """
        drafted = await self._sequence.draft(round_, position, news, size, exact)
        try:
            draft = messages.draft_from(drafted.payload, self._vocab_size, self._max_gamma)
        except InvalidRequest as error:
            raise PeerFailure(f"a drafter sent no draft: {error}") from None
        if wrong := faults([draft], self._vocab_size):
            raise PeerFailure(f"a drafter sent no draft: {wrong[0]}")
        return replace(drafted, payload=draft)
