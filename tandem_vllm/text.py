"""One of vLLM's texts, and its sequence on a drafter."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from dataclasses import dataclass, replace

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest, PeerFailure, TandemError
from tandem.peers.replicas.compatibility import longest_text
from tandem.peers.replicas.drafter_of_text import DrafterOfText
from tandem.peers.text.contracts import AheadWay, DraftReply, News, Prompt, TextDrafter
from tandem.peers.text.drafter_failover import DrafterWithFailover
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Rule
from tandem.rpc import messages
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import NO_SHAPING
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes
from tandem.verification.kernels.faults import faults
from tandem_vllm.pool import DrafterPool

# Between two looks at a drafter whose drafts were late.
_MOST_PASSES = 64
# Whichever rule decides, rounds go on without drafts.
_ANY_RULE = Rule("any")


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
        most_tokens: that it may have after these.
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
        self._request_id = _request_id_of(opening.name)
        self._vocab_size = vocab_size
        self._sampling = opening.sampling
        self._tokens = list(opening.token_ids)
        self._prompt_tokens = len(self._tokens) - opening.emitted_tokens
        self._end = len(self._tokens) + opening.most_tokens
        self._reserve = reserve
        self._told = len(self._tokens)
        self._round = 0
        self._failed = False
        self._backoff = Backoff()
        self._asked: asyncio.Task[RemoteDraft | None] | None = None
        self._drafting = DrafterOfText(pool.deadlines, record)
        self._drafter = self._opened()

    def _opened(self) -> DrafterWithFailover:
        """A drafter that opens, in the background."""
        self._reserved = sys.maxsize  # until it is known
        drafter = DrafterWithFailover(
            make=self._sequence,
            prompt=self._prompt,
            record=self.record,
            seconds=lambda: 0.0,  # none is waited for: rounds go on without
            rule=_ANY_RULE,
            on_loss=self._note_lost,
            let_go=self._drafting.let_go,
        )
        drafter.begin_late()
        return drafter

    def _note_lost(self, error: TandemError | None) -> None:
        if isinstance(error, PeerFailure) and not self._failed:
            # What a client asked for may be no drafter's fault, such as an unknown schema keyword:
            # one text alone has no drafter left alone by all.
            self._failed, self._sampling = True, replace(self._sampling, shaping=NO_SHAPING)
            return
        self._drafting.note_lost(error)

    def _sequence(self) -> TextDrafter | None:
        limits = self._pool.limits
        if limits is None or self._room(limits) < 1:
            return None
        most = limits.max_message_bytes
        call = self._drafting.begin(self._pool.pick(), None, most, most)
        return None if call is None else _Checked(call, self._vocab_size, limits.max_gamma)

    def _room(self, limits: common_pb2.ModelInfo) -> int:
        """Tokens to reserve after those that the drafter is told of."""
        return min(self._reserve, self._end - self._told, longest_text(limits, 0) - self._told)

    def _prompt(self) -> Prompt:
        limits = self._pool.limits
        assert limits is not None
        room = self._room(limits)
        self._reserved = self._told + room
        return Prompt(
            self._request_id,
            self._tokens[: self._told],
            self._sampling,
            self._round,
            room,
            self._vocab_size,
            emitted_tokens=self._told - self._prompt_tokens,
        )

    def extend(self, token_ids: list[int]) -> None:
        """The text has grown."""
        self._tokens += token_ids

    def ask(self, gamma: int) -> asyncio.Task[RemoteDraft | None] | None:
        """Have a draft made after the text; None while the last one is still being made, and for
        some passes after one that was late.

        Args:
            gamma: the longest draft.
        """
        if self._is_drafting or not self._backoff.is_over:
            return None
        self._round += 1
        self._asked = asyncio.create_task(self._draft(gamma))
        return self._asked

    @property
    def _is_drafting(self) -> bool:
        return self._asked is not None and not self._asked.done()

    def note(self, *, late: bool) -> None:
        """Whether the draft that was asked for last came too late for its pass."""
        self._backoff.note(late=late)

    def rest(self) -> None:
        """Let a drafter go that was not asked for long."""
        if not self._is_drafting:
            rest = self._drafter.draft(self._round, self._told, DraftSize(0))
            self._resting = asyncio.create_task(rest)

    async def _draft(self, gamma: int) -> RemoteDraft | None:
        limits = self._pool.limits
        if limits is None:
            return None
        news, self._told = self._tokens[self._told :], len(self._tokens)
        self._drafter.tell(news)
        gamma = min(gamma, limits.max_gamma, self._end - self._told)
        left = self._reserved - self._told
        if left < gamma and self._reserved < min(self._end, longest_text(limits, 0)):
            await self._open_anew()
            return None
        gamma = max(min(gamma, left), 0)
        drafted = await self._drafter.draft(
            self._round, self._told, DraftSize(gamma), ahead=AheadWay.HELD
        )
        if drafted is None or not drafted.token_ids:
            return None
        return RemoteDraft(self._sampling.seed, self._round, drafted.payload)

    async def _open_anew(self) -> None:
        """Reserve more, after the text as it is now."""
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


class Backoff:
    """Passes that go on without asking, after drafts that came late: twice as many each time.

    Attributes:
        late: how often in a row they were late.
    """

    def __init__(self) -> None:
        self.late = 0
        self._left = 0

    def note(self, *, late: bool) -> None:
        """Whether drafts were late."""
        self.late = self.late + 1 if late else 0
        self._left = min(2**self.late, _MOST_PASSES) if late else 0

    @property
    def is_over(self) -> bool:
        """Whether the pass that begins may ask; to be read once a pass."""
        if not self._left:
            return True
        self._left -= 1
        return False


def _request_id_of(name: str) -> str:
    """vLLM's id of a request, which a client may have chosen, as a drafter takes it."""
    if name.isprintable() and len(name) <= messages.MAX_REQUEST_ID:
        return name
    return f"vllm-{hashlib.blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"


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
        self,
        round_: int,
        position: int,
        news: News,
        size: DraftSize,
        needs_every_draft: bool,
        ahead: AheadWay = AheadWay.NOTHING,
    ) -> DraftReply:
        """See `TextDrafter`.

        Raises:
            PeerFailure: the draft is none.
        """
        drafted = await self._sequence.draft(round_, position, news, size, needs_every_draft, ahead)
        try:
            draft = messages.draft_from(drafted.payload, self._vocab_size, self._max_gamma)
        except InvalidRequest as error:
            raise PeerFailure(f"a drafter sent no draft: {error}") from None
        if wrong := faults([draft], self._vocab_size):
            raise PeerFailure(f"a drafter sent no draft: {wrong[0]}")
        return replace(drafted, payload=draft)
