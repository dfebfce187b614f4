"""Enumerates the real drafting methods over tables: each draw gets every possible outcome.

The generator that serves is enumerated, with its asks, its caches and its history. Only the decoder
is replaced, by tables of integer weights, and the random numbers, by all outcomes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Predicted
from tandem.speculation.proposal import Proposal
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS, Verifier
from tests.support.laws.tables import (
    PROMPT,
    VOCAB_SIZE,
    Answering,
    Chooser,
    Table,
    Text,
    cache_of,
    extended,
    feature_of,
    held_by,
    predictions_of,
    runs,
)
from tests.support.laws.trees.laws import stops


def key_of(sequence: DraftSequence) -> Any:
    """All that a sequence's later drafts may depend on: sequences with equal keys are merged."""
    state = sequence.state
    if isinstance(state, list) and state and isinstance(state[0], DraftSequence):
        state = tuple(key_of(part) for part in state)
    elif hasattr(state, "inner"):  # of a cascade
        state = key_of(state.reviewer), key_of(state.inner)
    else:
        state = repr(state)
    caches = tuple((cache.length, held_by(cache), cache.branches) for cache in sequence.caches)
    return tuple(sequence.token_ids), state, repr(sequence.threshold), caches


@dataclass(eq=False)
class Outcomes:
    """Every draft from a state of a sequence.

    Attributes:
        text: prompt and emitted tokens, at the beginning of the round.
        asked: tokens of the longest path that the drafter was asked for.
        drafts: all possible drafts.
        weights: the probability of each draft.
        after: the sequence after each draft, pickled.
        observed: the sequence after it also observed the emitted tokens, by draft and tokens.
    """

    text: Text
    asked: int
    drafts: list[Draft] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)
    observed: dict[tuple[int, Text], tuple[Any, DraftSequence]] = field(default_factory=dict)

    @cached_property
    def paths(self) -> list[list[list[int]]]:
        """The tokens that lead to each place of each draft."""
        return [[_path(draft, place) for place in range(len(draft) + 1)] for draft in self.drafts]


class Enumeration:
    """Whole decodings of one method.

    Attributes:
        deepest: draft so far.
        late: features of some rounds never come.
        room: of each cache, beside a text and its draft.
        garbled: what becomes of predictions on their way.
        scored: the tokens that the target computes a place of a draft after: those that lead
            there, if it is right.
        found: numbers that were found before, by all that they follow from.

    Args:
        drafter: the method.
        scorers: number of its scorers.
        target: table of p after every text.
        length: tokens of a text.
        gamma: greatest depth of a draft; less at the text's end.
        nodes: most nodes of a draft.
    """

    def __init__(
        self, drafter: Drafter, scorers: int, target: Table, length: int, gamma: int, nodes: int
    ) -> None:
        self.drafter, self._scorers, self._target = drafter, scorers, target
        self.length, self.gamma, self.nodes = length, gamma, nodes
        self._outcomes: dict[Any, Outcomes] = {}
        self._laws: dict[Text, npt.NDArray[np.float64]] = {}
        self.found: dict[Any, Any] = {}
        self.deepest = 0
        self.late = False
        self.garbled: Callable[[Predicted], Predicted] = lambda told: told
        self.scored: Callable[[Draft, list[int]], list[int]] = lambda draft, path: path
        self._predicted = extended(7, VOCAB_SIZE, self._known)
        self.room = 0

    @cached_property
    def _start(self) -> DraftSequence:
        return self._begun(())

    def _begun(self, text: Text) -> DraftSequence:
        """A sequence that is opened with a text without its last token, and then observes that."""
        tokens = [*PROMPT, *text]
        sequence = DraftSequence(tokens[:-1], Sampling(), VOCAB_SIZE, self.nodes)
        capacity = len(PROMPT) + self.length + self.gamma + self.nodes + self.room
        sequence.caches = [cache_of(capacity) for _ in range(self._scorers)]
        Answering(Chooser(()), None).run(self.drafter.open(sequence))
        self._observe(sequence, tokens[-1:], len(tokens) - 2)
        return sequence

    def _observe(
        self,
        sequence: DraftSequence,
        emitted: Sequence[int],
        first: int,
        draft: Draft | None = None,
    ) -> None:
        """Tell the drafter what was emitted, the features of positions from `first` on, and what
        the target predicted at a draft."""
        wanted = self.drafter.traits.feedback
        sequence.feedback.predicted = None
        if draft is not None and wanted.top:
            place = _place_of(draft, emitted[:-1])
            text = tuple(sequence.token_ids)
            told = predictions_of(wanted, draft, place, text, self._predicted)
            sequence.feedback.predicted = self.garbled(told)
        self.drafter.observe(sequence, emitted)
        if wanted.layers and not (self.late and len(sequence.token_ids) % 2):
            sequence.feedback.add(feature_of(sequence.token_ids, first))

    @property
    def outcomes(self) -> list[Outcomes]:
        """The outcomes of every state so far."""
        return list(self._outcomes.values())

    def expected(self) -> dict[Text, float]:
        """The law of texts under p alone."""
        law: dict[Text, float] = {}
        for text in product(range(VOCAB_SIZE), repeat=self.length):
            chance = 1.0
            for i, token in enumerate(text):
                chance *= float(self._p(text[:i])[token])
            law[text] = chance
        return law

    def _p(self, text: Text) -> npt.NDArray[np.float64]:
        if text not in self._laws:
            row = self._target.row(text).astype(np.float64)
            self._laws[text] = row / row.sum()
        return self._laws[text]

    def _known(self, text: Text) -> npt.NDArray[np.int64] | None:
        """The target's own row after a text, if it has one; else that of a guess."""
        behind = text[len(PROMPT) :]
        plain = len(behind) < self.length and max(behind, default=0) < VOCAB_SIZE
        return self._target.row(behind) if plain else None

    def law(self, rule: Verifier[Any]) -> dict[Text, float]:
        """The law of texts that the method drafts and the rule decides, over all rounds."""
        law: dict[Text, float] = {}
        pending: list[dict[Any, tuple[DraftSequence, float]]] = [{} for _ in range(self.length)]
        pending[0][key_of(self._start)] = self._start, 1.0
        for emitted in range(self.length):
            masses = [mass for _, mass in pending[emitted].values()]
            states = [
                self.drafted(key, sequence, self.length - emitted)
                for key, (sequence, _) in pending[emitted].items()
            ]
            for state, draft, news, chance in self._decided(rule, states):
                if not chance:
                    continue
                outcomes, mass = states[state], masses[state]
                text = (*outcomes.text[len(PROMPT) :], *news)[: self.length]
                if len(text) == self.length:
                    law[text] = law.get(text, 0.0) + mass * chance
                    continue
                own, after = self._observed(outcomes, draft, news)
                before = pending[len(text)].get(own, (after, 0.0))
                pending[len(text)][own] = before[0], before[1] + mass * chance
        return law

    def _observed(
        self, outcomes: Outcomes, draft: int, news: list[int]
    ) -> tuple[Any, DraftSequence]:
        """The key and state after a draft and the emitted tokens; independent of the rule."""
        key = draft, tuple(news)
        if key not in outcomes.observed:
            after = pickle.loads(outcomes.after[draft])
            first = len(after.token_ids) - 1
            self._observe(after, news, first, outcomes.drafts[draft])
            outcomes.observed[key] = key_of(after), after
        return outcomes.observed[key]

    def drafted(self, key: Any, sequence: DraftSequence, left: int) -> Outcomes:
        """All drafts of a sequence, of which so many tokens are left."""
        if key in self._outcomes:
            return self._outcomes[key]
        text, gamma = tuple(sequence.token_ids), min(self.gamma, left)
        found = self._outcomes[key] = Outcomes(text, min(gamma, self.nodes))

        before = pickle.dumps(sequence)  # which copies faster than `deepcopy`

        def run(chooser: Chooser) -> tuple[Draft, bytes]:
            own = pickle.loads(before)
            steps = self.drafter.draft(own, 1, gamma, self.nodes)
            return Answering(chooser, text, self.found).run(steps), pickle.dumps(own)

        for (draft, after), weight in runs(run):
            assert draft.depth <= gamma
            assert len(draft) <= self.nodes
            draft.check_shape(VOCAB_SIZE)
            self.deepest = max(self.deepest, draft.depth)
            found.drafts.append(draft)
            found.weights.append(weight)
            found.after.append(after)
        assert abs(sum(found.weights) - 1) < 1e-12
        return found

    def _decided(
        self, rule: Verifier[Any], states: Sequence[Outcomes]
    ) -> Iterator[tuple[int, int, list[int], float]]:
        """All that may be emitted after each draft of each state, decided in one batch: (state,
        draft, tokens, probability)."""
        if not states:
            return
        drafts = [draft for outcomes in states for draft in outcomes.drafts]
        assert {draft.misfit(rule.takes) for draft in drafts} == {""}, "the target would refuse it"
        places = [
            (state, draft, path, weight)
            for state, outcomes in enumerate(states)
            for draft, (path, weight) in enumerate(
                zip(outcomes.paths, outcomes.weights, strict=True)
            )
        ]
        most = max(len(draft) for draft in drafts)
        p = np.zeros((len(drafts), most + 1, VOCAB_SIZE))
        for b, (state, _, own, _) in enumerate(places):
            text = states[state].text[len(PROMPT) :]
            for place, path in enumerate(own):
                p[b, place] = self._p((*text, *self.scored(drafts[b], path)))
        proposal = Proposal.from_drafts(drafts)
        judged = rule.judged(proposal, torch.from_numpy(p))
        chances = stops(rule, proposal, judged.accept())
        for place in range(most + 1):
            at = torch.full_like(proposal.lengths, place)
            weights = judged.residual(at)
            residual = (weights / weights.sum(-1, keepdim=True)).tolist()
            for b, chance in enumerate(chances[:, place].tolist()):
                if chance <= 0:
                    continue
                state, draft, paths, own_weight = places[b]
                for token in range(VOCAB_SIZE):
                    weight = own_weight * chance * residual[b][token]
                    yield state, draft, [*paths[place], token], weight

    def broken_promise(self) -> str:
        """How the drafts break the promise of `pure`, in a sentence; empty if they keep it.

        Checks all drafts of whole decodings, and of rounds that begin after each text, as when a
        drafter is opened in the middle of a text.
        """
        self.law(VERIFIERS["token"])
        for emitted in range(self.length):
            for text in product(range(VOCAB_SIZE), repeat=emitted):
                sequence = self._begun(text)
                self.drafted(key_of(sequence), sequence, self.length - emitted)
        # By all tokens before a token: its row, and the text at the beginning of its round.
        rows: dict[Text, tuple[Any, Text]] = {}
        for found in self._outcomes.values():
            for draft in found.drafts:
                if draft.depth != found.asked:
                    return f"drafted {draft.depth} of {found.asked} after {found.text}"
                for node, place in enumerate(draft.places()):
                    before = (*found.text, *_path(draft, place))
                    row = _row_of(draft, node)
                    other, began = rows.setdefault(before, (row, found.text))
                    if other != row:
                        return (
                            f"after {before} a round that began after {began} has the row"
                            f" {other}, one that began after {found.text} has {row}"
                        )
        return ""

    def depth_of_one(self) -> int:
        """Depth of a draft after the prompt, for one of the possible outcomes."""
        sequence = self._begun(())
        steps = self.drafter.draft(sequence, 1, self.gamma, self.nodes)
        draft: Draft = Answering(Chooser(()), PROMPT).run(steps)
        return draft.depth

    def error(self, rule: Verifier[Any]) -> float:
        """The greatest error of a text's probability."""
        law, expected = self.law(rule), self.expected()
        return max(abs(law.get(text, 0.0) - chance) for text, chance in expected.items())


def _path(draft: Draft, place: int) -> list[int]:
    """The tokens that lead to a place."""
    return [draft.token_ids[step - 1] for step in draft.path_to(place)]


def _place_of(draft: Draft, path: Sequence[int]) -> int:
    """Where tokens of a draft lead to, the first sibling of equal ones."""
    place = 0
    for token_id in path:
        nodes = zip(draft.places(), draft.token_ids, strict=True)
        place = next(
            node for node, (at, own) in enumerate(nodes, 1) if (at, own) == (place, token_id)
        )
    return place


def _row_of(draft: Draft, node: int) -> Any:
    """The weight of each token in a node's row; a certain row has its one token."""
    row = draft.rows_of_nodes()[node]
    if not draft.sizes[row]:
        return {draft.token_ids[node]: 1}
    first = sum(draft.sizes[:row])
    entries = slice(first, first + draft.sizes[row])
    return dict(zip(draft.ids[entries].tolist(), draft.weights[entries].tolist(), strict=True))
