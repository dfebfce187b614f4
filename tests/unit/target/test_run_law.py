"""Texts of a run follow the target's law: the generator that serves, through all its outcomes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.drafting.choice.built_in import built_in
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.methods import METHODS
from tandem.drafting.model import ModelDrafter
from tandem.engine.asks import (
    Ask,
    Decide,
    Decision,
    Lap,
    Report,
    Score,
    StatesWanted,
    Steps,
    ToHost,
    Truncation,
)
from tandem.engine.draws import drafts_of
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import SequenceCache
from tandem.speculation.draft import Draft
from tandem.speculation.hidden_dtype import HiddenDtype
from tandem.speculation.proposal import Proposal
from tandem.speculation.sampling import Sampling
from tandem.target.v1 import target_pb2
from tandem.telemetry.stages import StageTimes
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.round import TargetSequence
from target_svc.run import Credit, RunRound, RunSize, run
from tests.support.laws.methods import key_of
from tests.support.laws.suited import rules_for
from tests.support.laws.tables import (
    PROMPT,
    VOCAB_SIZE,
    Answering,
    Chooser,
    Table,
    Text,
    cache_of,
    feature_of,
    runs,
    scorers_of,
)
from tests.support.laws.tree_laws import stops

TOLERANCE = 1e-12
SEEN = 1e-4
# Tokens whose law is compared, and the most of a text: each draft may be as deep as is asked.
LENGTH, GAMMA, NODES = 3, 3, 4
ROOM = LENGTH + 2 * GAMMA
SEED = 4
# Several grants: plain rounds between drafts, which the drafter is told of later.
SIZES = (RunSize(GAMMA, NODES), RunSize(), RunSize(GAMMA, NODES))


class RunAnswering(Answering):
    """Answers a run's asks, verdicts among them.

    Attributes:
        reported: rounds.

    Args:
        target: the table of the large model.
        judged: what was found of drafts before, by what it follows from.
    """

    def __init__(self, chooser: Chooser, target: Table, judged: dict[Any, Any]) -> None:
        super().__init__(chooser, None)
        self._target = target
        self._judged = judged
        self._scored: list[Text] = []
        self.reported: list[RunRound] = []

    def _answer(self, ask: Ask) -> Any:
        if isinstance(ask, Score):
            self._scored = self._feed(ask.feed)[-ask.feed.rows :]
            return None
        if isinstance(ask, Decide):
            return self._decided(ask)
        if isinstance(ask, ToHost) and isinstance(ask.answers, Decision):
            return ask.answers
        if isinstance(ask, Report):
            self.reported.append(ask.result)
            return None
        return StageTimes() if isinstance(ask, Lap) else super()._answer(ask)

    def _decided(self, ask: Decide) -> Any:
        """A place by the rule's chances, and a token by what it leaves there."""
        draft = _on_host(ask)
        rows = draft.ids.tobytes(), draft.weights.tobytes(), tuple(draft.rows_of_nodes())
        key = tuple(self._scored), tuple(draft.places()), rows, repr(ask.carry)
        if key not in self._judged:
            self._judged[key] = self._judge(ask)
        chances, residuals, carries = self._judged[key]
        place = self._chooser.choose(chances.tolist())
        token = self._chooser.choose(residuals[place].tolist())
        carry = carries[place][token]
        path = draft.path_to(place)
        decision = Decision(draft, place, len(path), token, [], carry)
        if ask.wanted is not None:
            text = self._scored[0]
            emitted = [*text, *(draft.token_ids[step - 1] for step in path), token]
            decision.states = feature_of(emitted, len(text) - 1).states
        return decision

    def _judge(self, ask: Decide) -> tuple[Any, Any, Any]:
        """The chance of each place; of each token there; and the rule's state behind each."""
        draft, laws = _on_host(ask), [self._law(text) for text in self._scored]
        p = torch.from_numpy(np.stack([laws[row] for row in draft.row_of_places()]))[None]
        proposal = Proposal.from_drafts([draft])
        judged = ask.rule.judged(proposal, p, [ask.carry])
        chances = stops(ask.rule, proposal, judged.accept())[0].numpy()
        places = [torch.full_like(proposal.lengths, place) for place in range(len(chances))]
        residuals = [judged.residual(at)[0].numpy() for at in places]
        carries = [
            [judged.carry(at, torch.full_like(at, token))[0] for token in range(VOCAB_SIZE)]
            for at in places
        ]
        return chances, residuals, carries

    def _law(self, text: Text) -> npt.NDArray[np.float64]:
        row = self._target.row(text[len(PROMPT) :]).astype(np.float64)
        law: npt.NDArray[np.float64] = row / row.sum()
        return law


def _on_host(ask: Decide) -> Draft:
    """What is decided, which may be a chain that the drafter has not brought to the host yet."""
    if isinstance(ask.draft, Draft):
        return ask.draft
    (draft,) = drafts_of([ToHost(ask.draft)])
    assert isinstance(draft, Draft)
    return draft


@dataclass(frozen=True)
class State:
    """A text between two rounds.

    Attributes:
        text: emitted.
        sequence: on the target.
    """

    text: Text
    sequence: TargetSequence

    @property
    def key(self) -> str:
        """All that its later rounds follow from: states with equal keys are merged."""
        sequence = self.sequence
        drafting = None if sequence.drafting is None else key_of(sequence.drafting)
        cache = sequence.caches[0]
        held = cache.length, cache.pool.tokens[: cache.length], cache.branches
        states = [(each.first, each.states.tolist()) for each in sequence.untold_states]
        return repr((self.text, sequence.untold, states, drafting, held, sequence.carry))


class RunLaw:
    """The law of the first tokens of a text that a target makes by itself.

    Attributes:
        deepest: draft so far.
        empty: drafts that were asked for and had no token.

    Args:
        name: of the method that drafts inside.
        rule: that decides.
        sizes: of the rounds, in turn; the last one's goes on.
        on_device: whether chains stay where they were drawn until they are decided.
    """

    def __init__(
        self, name: str, rule: str, sizes: Sequence[RunSize], *, on_device: bool = False
    ) -> None:
        keys: dict[str, Any] = {"max_nodes": NODES, "chains": 2, "acceptance": (0.7, 0.4)}
        recipe = built_in(name, RecipeSettings(**keys))
        longest = LENGTH + GAMMA
        self._target = Table(longest, SEED, zeros=True)
        depths = ((0.7, 0.4), (0.6, 0.3), (0.5, 0.2))
        scorers = scorers_of(recipe, longest, SEED + 1, zeros=True, depths=depths)
        drafter = recipe.make(scorers, Truncation(1.0, 0))
        wanted = None
        if drafter.wants is not None:
            wanted = StatesWanted((0,), HiddenDtype.BFLOAT16, on_device=True)
        self._own = OwnDrafts(drafter, target_pb2.TargetDrafts(), VOCAB_SIZE, on_device, wanted)
        self._caches, self._sizes = 1 + len(scorers), sizes
        self._rule = VERIFIERS[rule]
        # A rule with a fixed gamma has its law to the very end of the text.
        self._room = LENGTH if self._rule.fixed_gamma else ROOM
        self._judged: dict[Any, Any] = {}
        self.deepest = self.empty = 0

    def _opened(self) -> TargetSequence:
        """A text whose prompt was computed."""
        sequence = TargetSequence(
            [], Sampling(), self._rule, nodes=NODES, own_wanted=self._own.wanted
        )
        sequence.caches = [cache_of(len(PROMPT) + 2 * ROOM) for _ in range(self._caches)]
        sequence.untold, sequence.last_token = list(PROMPT), PROMPT[-1]
        sequence.length, sequence.end = len(PROMPT), len(PROMPT) + self._room
        answering = RunAnswering(Chooser(()), self._target, {})
        answering._feed(Feed(sequence.caches[0], PROMPT[:-1], 0))
        if self._own.wanted is not None:
            sequence.untold_states = [feature_of(PROMPT, len(PROMPT) - 2)]
        return sequence

    def _rounds(self, state: State, size: RunSize) -> Iterator[tuple[State, float]]:
        """All that a round may come to, with its probability."""

        def play(chooser: Chooser) -> State:
            sequence = copy.deepcopy(state.sequence)
            answering, credit = RunAnswering(chooser, self._target, self._judged), Credit(0)
            credit.grant(1, size)
            answering.run(run(None, sequence, credit, self._own))  # type: ignore[arg-type]
            (done,) = answering.reported
            draft = done.decision.draft
            self.empty += size.gamma > 0 and not len(draft)
            self.deepest = max(self.deepest, draft.depth)
            news = draft.emitted(done.decision.place, done.decision.next_token)
            return State((*state.text, *news), sequence)

        return runs(play)

    def error(self) -> float:
        """The greatest error of a text's probability."""
        law: dict[Text, float] = {}
        sizes, pending = list(self._sizes), {"": (State((), self._opened()), 1.0)}
        while pending:
            size, reached = sizes.pop(0) if len(sizes) > 1 else sizes[0], pending
            pending = {}
            for state, mass in reached.values():
                for after, chance in self._rounds(state, size):
                    if len(after.text) >= LENGTH:
                        text = after.text[:LENGTH]
                        law[text] = law.get(text, 0.0) + mass * chance
                        continue
                    before = pending.get(after.key, (after, 0.0))
                    pending[after.key] = before[0], before[1] + mass * chance
        assert abs(sum(law.values()) - 1) < TOLERANCE
        return max(
            abs(law.get(text, 0.0) - self._expected(text))
            for text in product(range(VOCAB_SIZE), repeat=LENGTH)
        )

    def _expected(self, text: Text) -> float:
        chance = 1.0
        for i, token in enumerate(text):
            row = self._target.row(text[:i])
            chance *= float(row[token]) / float(row.sum())
        return chance


def cases() -> list[tuple[str, str, bool]]:
    return [
        (name, rule.name, on_device)
        for name, recipe in METHODS.items()
        for rule in rules_for(recipe.drafter)
        if rule.name in ("block", "token") or rule.fixed_gamma
        for on_device in ((False, True) if name == "model" else (False,))
    ]


@pytest.mark.parametrize(("name", "rule", "on_device"), cases())
def test_a_run_leaves_the_law_as_it_is(name: str, rule: str, on_device: bool) -> None:
    sizes = SIZES[:1] if VERIFIERS[rule].fixed_gamma else SIZES
    law = RunLaw(name, rule, sizes, on_device=on_device)
    assert law.error() < TOLERANCE
    assert law.deepest == GAMMA if name == "model" else law.deepest >= 1
    # Also behind plain rounds a head has the newest hidden state.
    assert name == "lookup" or not law.empty


def test_a_draft_that_is_left_out_for_its_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModelDrafter.draft

    def choosy(*args: Any) -> Steps[Draft]:
        draft = yield from own(*args)
        return Draft.certain(()) if draft.token_ids[0] == 0 else draft

    monkeypatch.setattr(ModelDrafter, "draft", choosy)
    assert RunLaw("model", "token", SIZES).error() > SEEN


def test_a_cache_that_keeps_other_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SequenceCache.rollback

    def late(cache: SequenceCache, length: int) -> None:
        own(cache, min(length + 1, cache.length))

    monkeypatch.setattr(SequenceCache, "rollback", late)
    assert RunLaw("model", "token", SIZES).error() > SEEN
