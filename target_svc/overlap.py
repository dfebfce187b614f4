"""Rounds without a draft whose layers overlap: while a token goes through the upper layers, guesses
of the next one go through the lower ones.

Predictive pipelined decoding (PPD, Yang et al., arXiv 2307.05908), and SPEED (Hooper et al.,
2310.12072). A guess decides what is computed already, and never what is emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.answers import Decision, DeviceVerdict, ScoredRows
from tandem.engine.asks import Decide, ReadLogProbs, Score, Steps, ToHost
from tandem.engine.scorer import Scorer
from tandem.errors import EngineFailure
from tandem.inference.flight import Flight
from tandem.speculation.draft import NO_DRAFT
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.request.log_probs import LogProbsWanted
from target_svc.round import TargetSequence, cache_of, decide, extend, tell, verify


def _ignore(right: bool) -> None:
    """Count nothing."""


@dataclass(eq=False)
class Overlap:
    """How rounds without a draft overlap.

    Attributes:
        scorer: computes tokens by groups of the target's layers.
        groups: that a token goes through.
        exit: groups after which the next token is guessed.
        guesses: of the next token, at a time. Several only where one group is left behind the exit,
            so that no further token is guessed before one of them is chosen.
        on_guess: is called where the next token of a text was guessed: whether it was among the
            guesses.
    """

    scorer: Scorer
    groups: int
    exit: int = 1
    guesses: int = 1
    on_guess: Callable[[bool], None] = _ignore

    def round(
        self, sequence: TargetSequence, round_: int, wanted: FeedbackWanted | None = None
    ) -> Steps[Decision]:
        """Take the last emitted token through the layers that are left, and draw the next one.

        Args:
            sequence: that it continues.
            round_: keys the numbers.
            wanted: feedback that the verdict brings, without states; None for none.

        Raises:
            EngineFailure: the target's row was not finite.
        """
        cache, flight = cache_of(sequence), sequence.flight
        if flight is None:
            flight = sequence.flight = Flight.of(sequence.last_token)
        flight.last = None
        while True:
            scored: ScoredRows = yield Score(self.scorer, flight.feed(cache, self.exit))
            if flight.tokens[0].through == self.groups:
                break
            if flight.tokens[-1].through >= self.exit:
                last = scored.at(len(flight.tokens) - 1)
                yield from self._guess(sequence, flight, last, round_)
        shaped = None if sequence.shaped is None else sequence.shaped.rows([()])
        decision = yield from decide(sequence, round_, NO_DRAFT, scored.at(0), wanted, shaped)
        guessed = len(flight.tokens) > 1
        rows = flight.go_on(cache, decision.next_token)
        if guessed:
            self.on_guess(bool(rows))
        extend(sequence, decision)
        sequence.flight = flight if rows else None
        if rows and flight.tokens[-1].through >= self.exit:
            flight.last = scored.at(rows[-1])
        return tell(sequence, decision, wanted)

    def look_ahead(self, sequence: TargetSequence, round_: int) -> Steps[None]:
        """After a round that was reported, guess for the next one, where its row is at hand.

        Args:
            sequence: after the round, in the same step.
            round_: the coming one.
        """
        flight = sequence.flight
        if flight is not None and flight.last is not None:
            yield from self._guess(sequence, flight, flight.last, round_)
            flight.last = None

    def _guess(
        self, sequence: TargetSequence, flight: Flight, scored: ScoredRows, round_: int
    ) -> Steps[None]:
        """Guess what follows the flight's last token: first what its round's random number draws
        from the exit's row, then the likeliest others.

        Args:
            sequence: the text.
            flight: its tokens, in a line.
            scored: the row of the last token.
            round_: of the first token.
        """
        request, ahead = sequence.request, [one.token_id for one in flight.tokens[1:]]
        place = sequence.length + len(ahead)
        cache = cache_of(sequence)
        room = min(self.guesses, cache.promised - cache.used)
        if place + 1 >= request.end or room < 1:  # the next token is never computed
            return
        if not request.end_token_ids.isdisjoint(ahead):
            return
        shaped = None if sequence.shaped is None else sequence.shaped.rows([ahead])
        try:
            decided: DeviceVerdict = yield Decide(
                rule=request.rule,
                draft=NO_DRAFT,
                scored=scored,
                sampling=request.sampling,
                carry=sequence.carry,
                numbers=sequence.numbers,
                round=round_ + len(ahead),
                position=place - 1,
                shaped=shaped,
            )
            drawn: Decision = yield ToHost(decided)
        except EngineFailure:  # an exit's row may not be finite where the model's own is
            return
        if shaped is not None and shaped.dead[0]:
            return
        guesses = [drawn.next_token]
        if room > 1:
            wanted = LogProbsWanted(top=room)
            (told,) = yield ReadLogProbs(scored, [0], guesses, wanted)
            guesses += [token for token, _ in told.top if token != drawn.next_token]
        flight.guess(guesses[:room])


def plain_round(
    scorer: Scorer,
    sequence: TargetSequence,
    round_: int,
    wanted: FeedbackWanted | None,
    overlap: Overlap | None,
) -> Steps[Decision]:
    """A round without a draft.

    Args:
        scorer: the target's model.
        sequence: that it continues.
        round_: keys the numbers.
        wanted: feedback that the verdict brings; None for none. Hidden states need a whole pass.
        overlap: of the target's layers; None for whole passes.
    """
    if overlap is None or (wanted is not None and wanted.columns):
        return verify(scorer, sequence, round_, NO_DRAFT, wanted)
    return overlap.round(sequence, round_, wanted)
