"""What a sequence on the drafter and one on the target have in common: who asks, limits, room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from tandem.common.v1 import common_pb2
from tandem.engine.admission import AdmittedSequence, RoomWanted
from tandem.engine.engine import Engine
from tandem.errors import InvalidRequest
from tandem.rpc import messages
from tandem.rpc.streams.entries import StepRequest, StepResponse
from tandem.rpc.streams.sequence import Progress, ServedSequence
from tandem.serving.fingerprint import require_same
from tandem.shaping.grammar import Grammars
from tandem.shaping.text import ShapedText, shaped_text
from tandem.speculation.request.shaping import Shaping
from tandem.telemetry.logs import bind_request

# Tokens that a sequence can hold after its prompt before it has to grow, where it begins with less
# room than it may need.
_BEGINS_WITH = 64

Q = TypeVar("Q", bound=StepRequest)
R = TypeVar("R", bound=StepResponse)
S = TypeVar("S", bound=AdmittedSequence)


class OpenRequest(Protocol):
    """What every `open` says of its text."""

    request_id: str
    fingerprint: str
    emitted_tokens: int
    cache_salt: str
    may_be_given_back: bool

    @property
    def token_ids(self) -> Sequence[int]:
        """Of the prompt and of what was emitted."""


class EngineSequence(ServedSequence[Q, R], Generic[Q, R, S]):
    """A sequence whose steps an engine runs.

    Args:
        engine: runs the steps.
        info: limits that were announced.
        shares: whether sequences share computed prefixes.
    """

    def __init__(self, engine: Engine, info: common_pb2.ModelInfo, shares: bool) -> None:
        super().__init__()
        self._engine = engine
        self._shares = shares
        self._salt: str | None = None
        self._max_length = info.max_length
        self._max_gamma = info.max_gamma
        self._fingerprint = info.fingerprint
        self._incarnation = info.incarnation
        self._sequence: S
        self._progress: Progress
        self._end = 0  # tokens that it may grow to

    def _accept(self, request: OpenRequest) -> None:
        """Learn whose text it is, and that it counts on this service.

        Raises:
            InvalidRequest: the request id or the salt cannot be one, or more was emitted than there
                is.
            Unavailable: the caller counts on another service.
        """
        messages.check_request_id(request.request_id)
        messages.check_cache_salt(request.cache_salt)
        self.request_id = request.request_id
        bind_request(self.request_id)
        self._salt = request.cache_salt if self._shares else None
        require_same(request.fingerprint, self._fingerprint)
        if 0 < len(request.token_ids) <= request.emitted_tokens:
            raise InvalidRequest(
                f"open.emitted_tokens must be less than the {len(request.token_ids)} of token_ids"
            )

    def _room(self, prompt_tokens: int, *, in_full: bool, first: bool = False) -> RoomWanted:
        """What the sequence needs to open.

        Args:
            prompt_tokens: that it opens with.
            in_full: it cannot be given back.
            first: see `RoomWanted`.
        """
        least = None if in_full else prompt_tokens + _BEGINS_WITH
        return RoomWanted(self._end, least, first)

    def release(self) -> None:
        if hasattr(self, "_sequence"):
            self._engine.release(self._sequence)


async def shaped_behind(
    request: OpenRequest, shaping: Shaping, vocab_size: int, grammars: Grammars
) -> ShapedText | None:
    """The state of a text's shaping at the end of a checked request's ids; None for none.

    Raises:
        InvalidRequest: an id is beyond the vocabulary, or see `Grammars.state`.
    """
    prompt = len(request.token_ids) - request.emitted_tokens
    named = [token_id for token_id, _ in shaping.logit_bias]
    named += [token_id for word in shaping.bad_words for token_id in word]
    if max(named, default=0) >= vocab_size:
        raise InvalidRequest(
            f"sampling.shaping holds id {max(named)}, the vocabulary has {vocab_size} ids"
        )
    token_ids = list(request.token_ids)

    def text() -> ShapedText | None:
        return shaped_text(shaping, vocab_size, token_ids[:prompt], token_ids[prompt:], grammars)

    # A large grammar takes a second.
    return text() if shaping.grammar is None else await asyncio.to_thread(text)
