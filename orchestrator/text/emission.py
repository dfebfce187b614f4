"""From verdicts to what a client gets: tokens, their text, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from orchestrator.text.stop_strings import TextStream
from tandem.errors import InvalidRequest
from tandem.peers.text.contracts import DraftReply, RoundForecast, VerdictReply
from tandem.peers.text.measures import TextCounts
from tandem.peers.text.values import EmittedToken, FinishReason, Origin, Round, Stopping

# Of a resumed text, in one turn of the event loop: two milliseconds of decoding.
_TOKENS_A_TURN = 500


class Emission:
    """Commits verdicts, each as one round, cut after the token that ends the text.

    Attributes:
        finish_reason: why the text ended; None while it goes on.
        tail: text that was held back for a stop string when no token could come any more.
        stop_token_id: the stop token that ended the text, if one did.

    Args:
        stopping: when the text ends.
        eos_token_ids: end it too, unless they are ignored.
        text: decodes what is emitted.
        counts: of the text, kept here.
    """

    def __init__(
        self,
        stopping: Stopping,
        eos_token_ids: Collection[int],
        text: TextStream,
        counts: TextCounts,
    ) -> None:
        self._counts = counts
        self.finish_reason: FinishReason | None = None
        self.tail = ""
        self.stop_token_id: int | None = None
        self._stopping = stopping
        self._eos_token_ids = frozenset() if stopping.ignore_eos else frozenset(eos_token_ids)
        self._text = text
        self._received = 0

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, if one did."""
        return self._text.stop_string or ""

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self._stopping.max_new_tokens - self._received - self._counts.new_tokens

    async def resume(self, received: Sequence[int]) -> None:
        """Begin after tokens that the client has, with the text that they released. Other texts
        have their turns meanwhile.

        Raises:
            InvalidRequest: one of them ends the text, and is not the last.
        """
        for place, token in enumerate(received, 1):
            if not place % _TOKENS_A_TURN:
                await asyncio.sleep(0)
            self._release(token)
            if self.finish_reason is not None and place < len(received):
                raise InvalidRequest(
                    f"received_token_ids: the text ends with token {place} of them"
                )
        self._received, self._counts.new_tokens = self._counts.new_tokens, 0

    def commit(
        self,
        number: int,
        emitted: list[int],
        drafted: DraftReply | None,
        decided: VerdictReply,
        expected: RoundForecast | None = None,
    ) -> Round:
        """A round's tokens, with their origins and text."""
        gamma = nodes = 0
        kept, overlaps = decided.num_accepted, []
        siblings: list[tuple[int, int]] = []
        last = Origin.BONUS
        if drafted is not None:
            tree = drafted.tree
            gamma, nodes = tree.depth, len(drafted.token_ids)
            siblings = tree.ranks_to(decided.place)
            seen = tree.first_children(decided.place)
            # After the first correction the drafted context was not emitted.
            overlaps = [decided.overlaps[child - 1] for child in seen]
            self._counts.draft_bytes += drafted.payload_bytes
            last = Origin.BONUS if tree.is_leaf(decided.place) else Origin.CORRECTION
        self._counts.add_round(gamma, nodes, [rank for rank, _ in siblings], overlaps)
        tokens: list[EmittedToken] = []
        for place, token in enumerate(emitted):
            origin = last if place == kept else Origin.ACCEPTED
            others = siblings[place][1] if place < kept else 0
            log_prob = decided.log_probs[place] if decided.log_probs else None
            begin = self._text.place_of(token)
            text = self._release(token)
            if self.finish_reason in (FinishReason.EOS, FinishReason.STOP_TOKEN):
                begin = None
            tokens.append(EmittedToken(token, origin, text, others, log_prob, begin))
            if self.finish_reason is not None:
                break
        if decided.dead_end and self.finish_reason is None:
            self.finish_reason = FinishReason.DEAD_END
            self.tail = self._text.flush()
        return Round(number, tokens, gamma, nodes, expected, decided.prompt_log_probs)

    def _release(self, token: int) -> str:
        """The text that a token releases, having seen whether it ends the text."""
        self._counts.new_tokens += 1
        if token in self._eos_token_ids:
            self.finish_reason = FinishReason.EOS
        elif token in self._stopping.token_ids:
            self.finish_reason, self.stop_token_id = FinishReason.STOP_TOKEN, token
        else:
            told = self._received + self._counts.new_tokens
            text = self._text.push(token, may_stop=told > self._stopping.min_tokens)
            if self._text.stop_string is not None:
                self.finish_reason = FinishReason.STOP_STRING
                return text
            if self.left > 0:
                return text
            self.finish_reason = FinishReason.LENGTH
            return text + self._text.flush()
        return self._text.flush()
