"""Texts that a target makes by itself: the generator that serves, through all its outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tandem.drafting.choice.built_in import built_in
from tandem.drafting.choice.settings import RecipeSettings
from tandem.engine.answers import Decision, ScoredRows
from tandem.engine.asks import (
    Ask,
    Decide,
    Lap,
    ReadLogProbs,
    Report,
    Score,
    ToHost,
    Truncation,
)
from tandem.engine.numbers.feedback import predicted
from tandem.engine.numbers.home import drafts_of
from tandem.inference.feed import Feed, TokenInFlight, listed
from tandem.inference.kv.viewed import ViewedCache
from tandem.shaping.logits import shape
from tandem.shaping.text import ShapedText
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import WHOLE_MASS, Feedback
from tandem.speculation.proposal import Proposal
from tandem.speculation.request.log_probs import LogProbsWanted, TokenLogProb
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.telemetry.stages import StageTimes
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.overlap import Overlap
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence, open_
from target_svc.run import Credit, RunRound, run
from tests.support.laws.methods import key_of
from tests.support.laws.runs.copies import SequenceCopies
from tests.support.laws.runs.shared_memory import SharedMemory, warm_cache
from tests.support.laws.shaping import said_of
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
    runs,
    scorers_of,
)
from tests.support.laws.trees.laws import stops, told_of

TOLERANCE = 1e-12
SEEN = 1e-4
# Tokens whose law is compared, and the most of a text: each draft may be as deep as is asked.
LENGTH, GAMMA, NODES = 3, 3, 4
# Most probes of a draft.
PROBES = 8
ROOM = LENGTH + 2 * GAMMA
SEED = 4
# Several grants: plain rounds between drafts, which the drafter is told of later.
SIZES = (DraftSize(GAMMA, NODES), DraftSize(0), DraftSize(GAMMA, NODES))


class OtherToken(Exception):
    """A row goes on that was another token's in the layers before."""


@dataclass(eq=False)
class _Scored(ScoredRows):
    """The rows of the pass before, which its answering knows by their texts."""

    of: Any = None

    def at(self, row: int) -> ScoredRows:
        return _Scored(self.logits, self.first + row, 1, of=self.of)

    def chosen(self, rows: Sequence[int]) -> ScoredRows:
        self.of._scored = [self.of._scored[row] for row in rows]
        return self


class RunAnswering(Answering):
    """Answers a run's asks, verdicts among them.

    Attributes:
        reported: rounds.

    Args:
        target: the table of the large model.
        found: numbers that were found before, by all that they follow from.
    """

    def __init__(self, chooser: Chooser, target: Table, found: dict[Any, Any]) -> None:
        super().__init__(chooser, None, found)
        self._target, self._exit = target, Table(LENGTH + GAMMA, SEED + 2, zeros=False)
        self._predicted = extended(7, VOCAB_SIZE, self._known)
        self._scored: list[Text] = []
        # Whether the rows are an exit's, which has a table of its own.
        self._at_exit: list[bool] = []
        self.reported: list[RunRound] = []

    def _answer(self, ask: Ask) -> Any:
        if isinstance(ask, Score):
            self._at_exit = [False] * ask.feed.rows
            seen, rows = self._feed(ask.feed), ask.feed.rows
            self._scored = seen[-rows:] if ask.feed.flight is None else seen[:rows]
            return _Scored(None, 0, ask.feed.rows, of=self)  # type: ignore[arg-type]
        if isinstance(ask, Decide):
            return self._decided(ask)
        if isinstance(ask, ToHost) and isinstance(ask.answers, Decision):
            return ask.answers
        if isinstance(ask, ReadLogProbs):
            return self._tell(ask)
        if isinstance(ask, Report):
            self.reported.append(ask.result)
            return None
        return StageTimes() if isinstance(ask, Lap) else super()._answer(ask)

    def _feed(self, feed: Feed) -> list[Text]:
        """As of any cache. A row that a part of the target computed has what it saw as its state;
        where the target goes on behind that, the tokens in memory are those that the part left."""
        if feed.flight is not None:
            return self._fly(feed, feed.flight)
        if feed.resumed is None:
            seen = super()._feed(feed)
            pool = feed.cache.pool
            if isinstance(pool, SharedMemory):
                for slot in feed.cache.slots(0, feed.cache.used):
                    for layer in pool.layers:
                        layer[slot] = pool.tokens[slot]
            if isinstance(feed.cache, ViewedCache):
                feed.cache.exit_states.append(torch.tensor([[_coded(text)] for text in seen]))
            return seen
        cache, count = feed.cache, feed.resumed.count
        memory: list[int] = cache.pool.tokens  # type: ignore[attr-defined]
        ids: list[Any] = [memory[slot] for slot in cache.slots(cache.length, count)]
        ids += list(listed(feed.token_ids))[count:]
        seen = super()._feed(replace(feed, token_ids=ids, resumed=None))
        codes = torch.cat(list(feed.resumed.states))[:, 0].tolist()
        return [*map(_decoded, codes), *seen[count:]]

    def _fly(self, feed: Feed, flight: Sequence[TokenInFlight]) -> list[Text]:
        """What the rows of tokens in flight see: in its next group of layers each sees what those
        before it left there, and has itself what it saw in the group before."""
        cache, parents = feed.cache, list(feed.parents or ())
        pool: Any = cache.pool
        new = len(cache.branches)
        if new < len(flight):
            cache.grow([one.token_id for one in flight[new:]], parents[new:])
        seen: list[Text] = []
        for number, token in enumerate(flight):
            layer, path = pool.layers[token.through], []
            layer[cache.slots(cache.length + number, 1)[0]] = token.token_id
            row = number + 1
            while row:
                path.append(layer[cache.slots(cache.length + row - 1, 1)[0]])
                row = parents[row - 1]
            trunk = [layer[slot] for slot in cache.slots(0, cache.length)]
            seen.append((*trunk, *reversed(path)))
            if token.states is not None:
                (code,) = token.states.tolist()
                if _decoded(code) != seen[-1]:
                    raise OtherToken
            token.states, token.through = torch.tensor([_coded(seen[-1])]), token.through + 1
        self._at_exit = [token.through < len(pool.layers) for token in flight]
        return seen

    def _tell(self, ask: ReadLogProbs) -> list[TokenLogProb]:
        """Of each token, at the row of the text before it."""
        first = ask.scored.first
        text = self._scored[first]
        for row, token in zip(ask.rows, ask.token_ids, strict=True):
            assert self._scored[first + row] == text, "the row of another place"
            text = (*text, token)
        likeliest = np.argsort(-self._row(first), kind="stable")[: ask.wanted.top].tolist()
        top = tuple((token, 0.0) for token in likeliest)
        return [TokenLogProb(-float(token), top) for token in ask.token_ids]

    def _row(self, number: int) -> npt.NDArray[np.int64]:
        """Weights of a row of the pass."""
        text = self._scored[number][len(PROMPT) :]
        return (self._exit if self._at_exit[number] else self._target).row(text)

    def _decided(self, ask: Decide) -> Any:
        """A place by the rule's chances, and a token by what it leaves there."""
        draft, laws = _on_host(ask), self._shaped_laws(ask)
        key = laws.tobytes(), told_of(draft), repr(ask.carry)
        if key not in self._found:
            self._found[key] = self._judge(ask, laws)
        chances, residuals, carries = self._found[key]
        place = self._chooser.choose(chances)
        token = self._chooser.choose(residuals[place])
        carry = carries[place][token]
        path = draft.path_to(place)
        decision = Decision(draft, place, token, [], carry)
        if (wanted := ask.feedback) is not None:
            text, told = self._scored[0], Feedback(ask.round)
            if wanted.columns:
                emitted = [*text, *(draft.token_ids[step - 1] for step in path), token]
                states = feature_of(emitted, len(text) - 1).states
                positions = range(ask.position, ask.position + len(states))
                told = Feedback(ask.round, positions, states)
            if wanted.top:
                rows = predicted(wanted, draft, place, *self._likeliest(wanted.top))
                told = replace(told, predicted=rows)
            decision.feedback = told
        return decision

    def _likeliest(self, top: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Behind every row of the pass, those of probes among them: ids; weights and mass."""
        rows = np.stack([self._predicted(text) for text in self._scored]).astype(np.int32)
        ids = np.argsort(-rows, 1, kind="stable")[:, :top].astype(np.int32)
        weights = np.take_along_axis(rows, ids, 1)
        masses = weights.sum(1, keepdims=True) * WHOLE_MASS // rows.sum(1, keepdims=True)
        return ids, None if top == 1 else np.hstack([weights, masses])

    def _known(self, text: Text) -> npt.NDArray[np.int64] | None:
        behind = text[len(PROMPT) :]
        plain = len(behind) <= LENGTH + GAMMA and max(behind, default=0) < VOCAB_SIZE
        return self._target.row(behind) if plain else None

    def _judge(self, ask: Decide, laws: npt.NDArray[np.float64]) -> tuple[Any, Any, Any]:
        """The chance of each place; of each token there; and the rule's state behind each."""
        draft = _on_host(ask)
        p = torch.from_numpy(laws[list(draft.row_of_places())])[None]
        proposal = Proposal.from_drafts([draft])
        judged = ask.rule.judged(proposal, p, [ask.carry])
        chances = stops(ask.rule, proposal, judged.accept())[0].tolist()
        places = [torch.full_like(proposal.lengths, place) for place in range(len(chances))]
        residuals = [judged.residual(at)[0].tolist() for at in places]
        carries = [
            [judged.carry(at, torch.full_like(at, token))[0] for token in range(VOCAB_SIZE)]
            for at in places
        ]
        return chances, residuals, carries

    def _shaped_laws(self, ask: Decide) -> npt.NDArray[np.float64]:
        """[R, V] of the rows of the pass."""
        # Those of the draft alone: a probe may be no token.
        first = ask.scored.first
        rows = np.stack([self._row(first + row) for row in range(ask.scored.count)])
        if ask.shaped is None:
            laws: npt.NDArray[np.float64] = rows / rows.sum(-1, keepdims=True)
            return laws
        key = "laws", rows.tobytes(), said_of(ask.shaped)
        if key not in self._found:
            shaped = shape(torch.from_numpy(rows).double().log(), [(0, ask.shaped)])
            self._found[key] = shaped.softmax(-1).numpy()
        laws = self._found[key]
        return laws


def _coded(text: Text) -> int:
    """A text as a number."""
    return sum((token + 1) * (VOCAB_SIZE + 1) ** i for i, token in enumerate(text))


def _decoded(code: int) -> Text:
    text = []
    while code:
        code, token = divmod(code, VOCAB_SIZE + 1)
        text.append(token - 1)
    return tuple(text)


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
        shaped: makes the state of a text's shaping behind the prompt and the first token.
        end_token_ids: that end a text.
        log_probs: whether they come with the tokens.
        warm: whether the target found the prompt computed, and lets the text be found.
        exit_: whether the drafter is a part of the target, behind which the target goes on.
        groups: of layers, in which rounds without a draft overlap; 1 for whole passes.
        guesses: of the next token. Several are made before the last group, a single one behind
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
        """What is told of a text: nothing behind its end."""
        ends = (place for place, token in enumerate(text, 1) if token in self._ends)
        return text[: next(ends, len(text))]

    def row(self, text: Text) -> npt.NDArray[np.int64]:
        """The target's weights behind a text."""
        return self._target.row(text)

    def _expected(self, text: Text) -> float:
        chance = 1.0
        for i, token in enumerate(text):
            row = self._target.row(text[:i])
            chance *= float(row[token]) / float(row.sum())
        return chance
