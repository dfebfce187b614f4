"""Enumerates prepared drafts: after each outcome they have the law of drafts that were not."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.drafting.ahead.prepare import Ahead, AheadDraft, room_for
from tandem.drafting.drafter import DraftSequence
from tandem.speculation.draft import Draft
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.tree import DraftSize
from tandem.verification import VERIFIERS
from tests.support.laws.methods import Enumeration, key_of
from tests.support.laws.tables import PROMPT, Answering, Chooser, runs

# A draft, all that its sequence holds after it, and their probability.
Law = dict[Any, float]
ROUND = 7


def law_of(drafts: Sequence[Draft], weights: Sequence[float], after: Sequence[bytes]) -> Law:
    law: Law = {}
    for draft, weight, behind in zip(drafts, weights, after, strict=True):
        rows = draft.sizes, draft.ids.tobytes(), draft.weights.tobytes(), draft.rows_of_nodes()
        key = draft.token_ids, draft.places(), repr(rows), key_of(pickle.loads(behind))
        law[repr(key)] = law.get(repr(key), 0.0) + weight
    return law


class PreparedDrafts:
    """Each second draft of whole decodings, prepared after all outcomes of the first.

    Attributes:
        came: how often an outcome was prepared, and how often not.

    Args:
        enumeration: of the method, with room.
        nodes: that may be prepared.
        make: makes what prepares.
    """

    def __init__(self, enumeration: Enumeration, nodes: int, make: type[Ahead] = Ahead) -> None:
        self._of, self._nodes, self._make = enumeration, nodes, make
        self.came: Counter[PreparedOutcome | None] = Counter()
        enumeration.room = room_for(nodes, enumeration.nodes)

    def error(self, passes: int) -> float:
        """The greatest error of a draft's probability, where outcomes come so many passes later."""
        self._of.law(VERIFIERS["token"])
        errors = [0.0]
        for found in self._of.outcomes:
            for (number, news), (key, after) in list(found.observed.items()):
                left = self._of.length - (len(after.token_ids) - len(PROMPT))
                plain = self._of.drafted(key, after, left)
                expected = law_of(plain.drafts, plain.weights, plain.after)
                law = self._law(found.after[number], found.drafts[number], news, left, passes)
                texts = expected.keys() | law.keys()
                errors += [abs(expected.get(one, 0.0) - law.get(one, 0.0)) for one in texts]
        return max(errors)

    def _law(self, before: bytes, draft: Draft, news: Sequence[int], left: int, passes: int) -> Law:
        size = DraftSize(min(self._of.gamma, left), self._of.nodes)

        def run(chooser: Chooser) -> tuple[Draft, bytes]:
            own: DraftSequence = pickle.loads(before)
            text = (*own.token_ids, *news)
            ahead = self._make(self._of.drafter, own, 1 << 20)
            answering = Answering(chooser, tuple(own.token_ids[:-1]), self._of.found)
            answering.explores = lambda behind: behind[: len(text)] == text
            answering.run(ahead.prepare(ROUND, draft, size, self._nodes), passes)
            steps = ahead.go_on(ROUND + 1, news, size, ())
            made: AheadDraft = answering.run(steps)
            self.came[made.outcome] += 1
            return made.draft, pickle.dumps(own)

        results = [(made, after, weight) for (made, after), weight in runs(run)]
        made, after, weights = zip(*results, strict=True)
        return law_of(made, weights, after)
