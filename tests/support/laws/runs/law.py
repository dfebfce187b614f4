"""Texts that a target makes by itself: the generator that serves, through all its outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.drafting.choice.built_in import built_in
from tandem.drafting.choice.settings import RecipeSettings
from tandem.engine.asks import (
    Truncation,
)
from tandem.inference.feed import Feed
from tandem.inference.kv.viewed import ViewedCache
from tandem.shaping.text import ShapedText
from tandem.speculation.request.log_probs import LogProbsWanted
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.overlap import Overlap
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence, open_
from target_svc.run import Credit, run
from tests.support.laws.methods import key_of
from tests.support.laws.runs.answering import GAMMA, LENGTH, NODES, SEED, RunAnswering
from tests.support.laws.runs.copies import SequenceCopies
from tests.support.laws.runs.shared_memory import warm_cache
from tests.support.laws.tables import (
    PROMPT,
    VOCAB_SIZE,
    Chooser,
    Table,
    Text,
    cache_of,
    feature_of,
    held_by,
    runs,
    scorers_of,
)

TOLERANCE = 1e-12
SEEN = 1e-4
# Most probes of a draft.
PROBES = 8
ROOM = LENGTH + 2 * GAMMA
# Several grants: plain rounds between drafts, which the drafter is told of later.
SIZES = (DraftSize(GAMMA, NODES), DraftSize(0), DraftSize(GAMMA, NODES))


@dataclass(frozen=True)
class State:
    """A text between two rounds.

    Attributes:
        text: emitted.
        sequence: on the target.
        ended: the text is.
    """

    text: Text
    sequence: TargetSequence
    ended: bool = False

    @property
    def key(self) -> str:
        """All that its later rounds follow from: states with equal keys are merged."""
        sequence = self.sequence
        own = sequence.own
        assert own is not None
        drafting = None if own.sequence is None else key_of(own.sequence)
        cache = sequence.caches[0]
        held = cache.length, held_by(cache), cache.branches
        untold = [
            (each.positions, None if each.states is None else each.states.tolist(), each.predicted)
            for each in own.untold
        ]
        flight = sequence.flight
        flying = flight and [
            flight.parents,
            [(one.token_id, one.through, one.states) for one in flight.tokens],
            [[layer[slot] for slot in cache.slots(0, cache.used)] for layer in cache.pool.layers],
        ]
        known = own.news, untold, drafting, flying
        return repr((self.text, *known, held, sequence.carry))


class RunLaw:
    """The law of the first tokens of a text that a target makes by itself.

    Attributes:
        deepest: draft so far.
        guessed: rounds of layers that overlap, by whether their token was guessed.
        empty: drafts that were asked for and had no token.

    Args:
        name: of the method that drafts inside.
        rule: that decides.
        sizes: of the rounds, in turn; the last one's goes on.
        on_device: whether chains stay where they were drawn until they are decided.
        shaped: makes the state of a text's shaping after the prompt and the first token.
        end_token_ids: that end a text.
        log_probs: whether they come with the tokens.
        warm: whether the target found the prompt computed, and lets the text be found.
        exit_: whether the drafter is a part of the target, after which the target goes on.
        groups: of layers, in which rounds without a draft overlap; 1 for whole passes.
        guesses: of the next token. Several are made before the last group, a single one after
            the first.
        given_back: whether the target gives the text back before each of its rounds, but for the
            first one; it is opened again there.
    """

    def __init__(
        self,
        name: str,
        rule: str,
        sizes: Sequence[DraftSize],
        *,
        on_device: bool = False,
        shaped: Callable[[], ShapedText] | None = None,
        end_token_ids: Sequence[int] = (),
        log_probs: bool = False,
        warm: bool = False,
        exit_: bool = False,
        groups: int = 1,
        guesses: int = 1,
        given_back: bool = False,
    ) -> None:
        keys: dict[str, Any] = {"max_nodes": NODES, "chains": 2, "acceptance": (0.7, 0.4)}
        keys |= {"lookahead_window": 2, "lookahead_ngram": 3, "lookahead_candidates": 2}
        keys |= {"masks": 2, "masks_top": VOCAB_SIZE, "phrases_ngram": 2}
        recipe = built_in(name, RecipeSettings(**keys))
        longest = LENGTH + GAMMA
        # A model's weights are never 0, so that only masks leave nothing.
        self._target = Table(longest, SEED, zeros=shaped is None)
        depths = ((0.7, 0.4), (0.6, 0.3), (0.5, 0.2))
        scorers = scorers_of(recipe, longest, SEED + 1, zeros=True, depths=depths)
        drafter = recipe.make(scorers, Truncation(1.0, 0))
        told = drafter.traits.feedback
        wanted = told.of(told.layers, on_device=True) if told.told else None
        info = target_pb2.TargetDrafts()
        self._own = OwnDrafts(drafter, info, VOCAB_SIZE, on_device, wanted, exit=int(exit_))
        self._caches, self._sizes = 1 + len(scorers), sizes
        self._rule = VERIFIERS[rule]
        # A rule with a fixed gamma has its law to the very end of the text.
        self._room = LENGTH if self._rule.needs_every_draft else ROOM
        self._found: dict[Any, Any] = {}
        self._shaped, self._ends = shaped, frozenset(end_token_ids)
        self._log_probs = LogProbsWanted() if log_probs else None
        self._warm, self._given_back = warm, given_back
        self.guessed = {True: 0, False: 0}
        self._groups, self._overlap = groups, None
        if groups > 1:
            exit_group = groups - 1 if guesses > 1 else 1
            self._overlap = Overlap(self._target, groups, exit_group, guesses, self._count)
        self.deepest = self.empty = 0

    @property
    def _shares(self) -> bool:
        """Whether a text finds its prompt computed."""
        return self._warm or self._overlap is not None

    def _count(self, right: bool) -> None:
        self.guessed[right] += 1

    def _opened(self) -> TargetSequence:
        """A text whose prompt was computed."""
        sequence = self._new(PROMPT)
        sequence.length, sequence.last_token = len(PROMPT), PROMPT[-1]
        if not self._shares:
            self._answering()._feed(Feed(sequence.caches[0], PROMPT[:-1], 0))
        own = sequence.own
        if own is not None and own.wanted is not None and own.wanted.layers:
            own.untold = [feature_of(PROMPT, len(PROMPT) - 2)]
        return sequence

    def _moved(self, state: State) -> State:
        """The text, opened again before its next round."""
        sequence = self._new((*PROMPT, *state.text))
        sequence.carry = state.sequence.carry
        if sequence.shaped is not None:
            sequence.shaped.extend(state.text)
        opened = open_(None, sequence, len(state.text), resumes=True)  # type: ignore[arg-type]
        assert self._answering().run(opened) is None
        return replace(state, sequence=sequence)

    def _answering(self) -> RunAnswering:
        """Answers what has one outcome."""
        return RunAnswering(Chooser(()), self._target, {})

    def _new(self, token_ids: Sequence[int]) -> TargetSequence:
        """A text of which nothing is computed, or the prompt alone."""
        request = TargetRequest(
            Sampling(),
            self._rule,
            NODES,
            len(PROMPT) + self._room,
            self._ends,
            log_probs=self._log_probs,
        )
        own = OwnDrafting(list(token_ids), self._own.feedback)
        sequence = TargetSequence(list(token_ids), request, own=own)
        sequence.shaped = None if self._shaped is None else self._shaped()
        room = len(PROMPT) + 2 * ROOM + PROBES
        sequence.caches = [cache_of(room) for _ in range(self._caches)]
        if self._own.exit:
            sequence.caches[1:2] = [ViewedCache()]
        if self._shares:
            sequence.caches[0] = warm_cache(room, self._groups)
        return sequence

    def _rounds(self, state: State, size: DraftSize) -> Iterator[tuple[State, float]]:
        """All that a round may come to, with its probability."""
        copies = SequenceCopies(state.sequence)

        def play(chooser: Chooser) -> State:
            sequence = copies.fresh()
            answering, credit = RunAnswering(chooser, self._target, self._found), Credit(0)
            credit.grant(1, size)
            answering.run(run(None, sequence, credit, self._own, self._overlap))  # type: ignore[arg-type]
            (done,) = answering.reported
            if self._log_probs is not None:
                told = [-one.value for one in done.decision.log_probs]
                assert told == done.decision.emitted
            draft = done.decision.draft
            self.empty += size.gamma > 0 and not len(draft)
            self.deepest = max(self.deepest, draft.depth)
            return State((*state.text, *done.decision.emitted), sequence, done.ended)

        return runs(play)

    def error(self) -> float:
        """The greatest error of a text's probability."""
        law = self.law()
        return max(
            abs(law.get(text, 0.0) - self._expected(text))
            for text in product(range(VOCAB_SIZE), repeat=LENGTH)
        )

    def law(self) -> dict[Text, float]:
        """Of a text's first tokens; of one that ends before, all of them, up to its end."""
        law: dict[Text, float] = {}
        sizes, pending = list(self._sizes), {"": (State((), self._opened()), 1.0)}
        while pending:
            size, reached = sizes.pop(0) if len(sizes) > 1 else sizes[0], pending
            pending = {}
            for state, mass in reached.values():
                for after, chance in self._rounds(state, size):
                    if len(after.text) >= LENGTH or after.ended:
                        text = self._up_to_end(after.text)[:LENGTH]
                        law[text] = law.get(text, 0.0) + mass * chance
                        continue
                    after = self._moved(after) if self._given_back else after
                    before = pending.get(after.key, (after, 0.0))
                    pending[after.key] = before[0], before[1] + mass * chance
        assert abs(sum(law.values()) - 1) < TOLERANCE
        return law

    def _up_to_end(self, text: Text) -> Text:
        """What is told of a text: nothing after its end."""
        ends = (place for place, token in enumerate(text, 1) if token in self._ends)
        return text[: next(ends, len(text))]

    def row(self, text: Text) -> npt.NDArray[np.int64]:
        """The target's weights after a text."""
        return self._target.row(text)

    def _expected(self, text: Text) -> float:
        chance = 1.0
        for i, token in enumerate(text):
            row = self._target.row(text[:i])
            chance *= float(row[token]) / float(row.sum())
        return chance
