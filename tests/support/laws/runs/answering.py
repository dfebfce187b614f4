"""Answers to the asks of a target that makes texts by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.answers import Decision, ScoredRows
from tandem.engine.asks import (
    Ask,
    Decide,
    Lap,
    ReadLogProbs,
    Report,
    Score,
    ToHost,
)
from tandem.engine.numbers.feedback import predicted
from tandem.engine.numbers.home import drafts_of
from tandem.inference.feed import Feed, TokenInFlight, listed
from tandem.inference.kv.viewed import ViewedCache
from tandem.shaping.logits import shape
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import WHOLE_MASS, Feedback
from tandem.speculation.proposal import Proposal
from tandem.speculation.request.log_probs import TokenLogProb
from tandem.telemetry.stages import StageTimes
from target_svc.run import RunRound
from tests.support.laws.runs.shared_memory import SharedMemory
from tests.support.laws.shaping import said_of
from tests.support.laws.tables import (
    PROMPT,
    VOCAB_SIZE,
    Answering,
    Chooser,
    Table,
    Text,
    extended,
    feature_of,
)
from tests.support.laws.trees.laws import stops, told_of

# Tokens whose law is compared, and the most of a text: each draft may be as deep as is asked.
LENGTH, GAMMA, NODES = 3, 3, 4
SEED = 4


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
        where the target goes on after that, the tokens in memory are those that the part left."""
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
        """After every row of the pass, those of probes among them: ids; weights and mass."""
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
        """The chance of each place; of each token there; and the rule's state after each."""
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
