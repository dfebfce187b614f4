"""A target's sequence and its rounds, as asks: one pass, then the rule's verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tandem.engine.answers import Decision, DeviceVerdict, ScoredRows
from tandem.engine.asks import (
    Decide,
    ReadLogProbs,
    ReadTokens,
    Score,
    Steps,
    Take,
    ToHost,
)
from tandem.engine.scorer import Scorer
from tandem.inference.feed import DrawnToken, Feed, Resumed
from tandem.inference.flight import Flight
from tandem.inference.kv.pool import SequenceCache
from tandem.shaping.text import ShapedRows, ShapedText
from tandem.speculation.draft import NO_DRAFT, Draft
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.probes import NO_PROBES
from tandem.speculation.randomness import VerdictNumbers
from tandem.speculation.request.log_probs import LogProbsWanted, TokenLogProb
from tandem.speculation.request.sampling import Sampling
from tandem.verification import Verifier
from target_svc.own_drafting import OwnDrafting

# Tokens of a prompt whose log probabilities are read at once: others wait for such a pass, and each
# has a row as wide as the vocabulary.
_PIECE = 32


@dataclass(frozen=True)
class TargetRequest:
    """What a text asks of its target, from its beginning to its end.

    Attributes:
        sampling: its seed keys the draws.
        rule: that decides drafts.
        nodes: the most that a draft may have; 0 where all are chains.
        end: tokens that the text may grow to.
        end_token_ids: that end a run.
        feedback: that its drafter wants; None for none.
        log_probs: that come with its tokens; None for none.
        salt: of the texts with which it shares its computed prefix; None shares nothing.
    """

    sampling: Sampling
    rule: Verifier[Any]
    nodes: int = 0
    end: int = 0
    end_token_ids: frozenset[int] = frozenset()
    feedback: FeedbackWanted | None = None
    log_probs: LogProbsWanted | None = None
    salt: str | None = None


@dataclass(eq=False)
class TargetSequence:
    """One sequence as the target sees it.

    Attributes:
        token_ids: of the prompt, and emitted ones.
        request: what is asked of it.
        carry: the verifier's state between rounds.
        own: the text as the target's own drafter has it; None where it has no drafter.
        caches: its extent of the KV pool, which holds all tokens but the last; then those of the
            drafter's pools.
        flight: its last token, and guesses of what follows, on their way through the layers; None
            where it begins with the next round.
        shaped: what its request does to the logits, at the text's end; None for nothing.
        prompt_log_probs: of the prompt's tokens but for the first, once they are computed.
        last_token: emitted last, not computed yet.
        length: tokens of the text, the last one included; 0 until its first step begins.
        numbers: of its verdicts.
    """

    token_ids: list[int]
    request: TargetRequest
    carry: Any = None
    own: OwnDrafting | None = None
    caches: list[Any] = field(default_factory=list)
    flight: Flight | None = None
    shaped: ShapedText | None = None
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    last_token: int = -1
    length: int = 0
    numbers: VerdictNumbers = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = VerdictNumbers.of(self.request.sampling.seed)

    @property
    def nodes(self) -> int:
        """As the request says."""
        return self.request.nodes


def cache_of(sequence: TargetSequence) -> SequenceCache:
    """Its extent of the target's pool."""
    cache: SequenceCache = sequence.caches[0]
    return cache


def open_(
    scorer: Scorer, sequence: TargetSequence, round_: int, *, resumes: bool = False
) -> Steps[Decision | None]:
    """Compute the prompt and draw the first token, a round without a draft.

    What is found of the prompt is not computed, unless its states or log probabilities are wanted.
    No token is drawn with a carry, since the rule needs a draft at the next position; nor where the
    text `resumes` between two rounds.
    """
    prompt, cache, salt = sequence.token_ids, cache_of(sequence), sequence.request.salt
    sequence.length = len(prompt)
    if sequence.carry is not None or resumes:
        *before, sequence.last_token = prompt
        if before:
            yield Take(scorer, Feed(cache, before[cache.adopt(before, salt) :], 0))
            cache.publish(before, len(before))
        return None
    wanted = _told_of_prompt(sequence)
    states = 0 if wanted is None else min(wanted.prompt_tokens, len(prompt))
    log_probs = sequence.request.log_probs
    if log_probs is not None and log_probs.prompt:
        cache.adopt((), salt)
        yield from _read_prompt(scorer, sequence, log_probs)
        rest, states = prompt[-1:], min(states, 1)
    else:
        rest = prompt[cache.adopt(prompt[: len(prompt) + 1 - max(states, 1)], salt) :]
    scored = yield Take(scorer, Feed(cache, rest, 1, states=states))
    shaped = None if sequence.shaped is None else sequence.shaped.rows([()])
    told = wanted if states else None
    decision = yield from decide(sequence, round_, NO_DRAFT, scored, told, shaped)
    cache.rollback(sequence.length)
    extend(sequence, decision)
    return tell(sequence, decision, told)


def _told_of_prompt(sequence: TargetSequence) -> FeedbackWanted | None:
    """What is wanted of the prompt: by the text's drafter, else by the target's own; or None."""
    own = None if sequence.own is None else sequence.own.wanted
    for wanted in (sequence.request.feedback, own):
        if wanted is not None and wanted.columns:
            return wanted.at_open
    return None


def _read_prompt(scorer: Scorer, sequence: TargetSequence, wanted: LogProbsWanted) -> Steps[None]:
    """Compute all of the prompt but its last token, and read what it says of the prompt."""
    prompt, cache = sequence.token_ids, cache_of(sequence)
    for first in range(0, len(prompt) - 1, _PIECE):
        piece = prompt[first : min(first + _PIECE, len(prompt) - 1)]
        scored = yield Score(scorer, Feed(cache, piece, len(piece)))
        following = prompt[first + 1 : first + 1 + len(piece)]
        sequence.prompt_log_probs += yield ReadLogProbs(
            scored, range(len(piece)), following, wanted
        )


class Resumable(NamedTuple):
    """What is computed of a draft's rows where a part of the target drafted it.

    Attributes:
        resumed: of the last emitted token, and of drafted ones; None for nothing.
        nodes: of a tree, the row of each node that is computed; None where they are the first ones.
    """

    resumed: Resumed | None = None
    nodes: Mapping[int, int] | None = None

    def order(self, computed: Sequence[int]) -> list[int] | None:
        """The order in which a draft's nodes go through the pass, those that are computed first.

        Args:
            computed: places of the draft that have a row.

        Returns:
            Indices into `computed`; None where the rows are not those of the draft.
        """
        if self.nodes is None:
            return list(range(len(computed)))
        found = [self.nodes.get(place - 1, len(computed) + 1) for place in computed]
        rows = sorted(row for row in found if row <= len(computed))
        if rows != list(range(1, len(self.nodes) + 1)):
            return None
        return sorted(range(len(computed)), key=found.__getitem__)


NOTHING_COMPUTED = Resumable()


def verify(
    scorer: Scorer,
    sequence: TargetSequence,
    round_: int,
    draft: Draft | Sequence[DrawnToken],
    wanted: FeedbackWanted | None = None,
    computed: Resumable = NOTHING_COMPUTED,
) -> Steps[Decision]:
    """Score a draft, decide, and move the sequence on by accepted + 1 tokens.

    Twins are not computed. Probes are computed after the draft, and nothing that is decided looks
    at their rows.

    Args:
        scorer: the target's model.
        sequence: that it continues.
        round_: keys the numbers.
        draft: on the host; or a chain on the scorer's device, which comes to the host with the
            verdict.
        wanted: feedback that the verdict brings; None for none.
        computed: what need not be computed. States cannot be had beside that.
    """
    sequence.flight = None  # the pass writes over it
    tokens, parents, at, resumed = _arranged(draft, computed)
    probes = draft.probes if isinstance(draft, Draft) else NO_PROBES
    paths: list[Sequence[int]] = []
    if sequence.shaped is not None:
        paths = _paths(draft) if isinstance(draft, Draft) else _prefixes((yield ReadTokens(draft)))
    fed = [sequence.last_token, *tokens]
    rows = len(fed)
    if probes and isinstance(draft, Draft):
        parents = [*(range(rows - 1) if parents is None else parents), *_hung(draft, rows)]
        fed += probes.token_ids
    states = len(fed) if wanted is not None and wanted.columns else 0
    if resumed is not None:  # a row is left to compute, at least
        resumed = resumed.first(len(fed) - 1)
    feed = Feed(cache_of(sequence), fed, len(fed), parents, states, resumed=resumed)
    everything: ScoredRows = yield Score(scorer, feed)
    if at:
        everything = everything.chosen(at)
    # The rule sees the draft's rows alone.
    scored = replace(everything, count=rows) if probes else everything
    # A device computes the pass meanwhile.
    shaped = None if sequence.shaped is None else sequence.shaped.rows(paths)
    decision = yield from decide(sequence, round_, draft, scored, wanted, shaped)
    _keep(sequence, decision, at)
    extend(sequence, decision)
    return tell(sequence, decision, wanted)


class _Arranged(NamedTuple):
    """A draft as it goes through a pass, after the last emitted token.

    Attributes:
        tokens: that are computed.
        parents: row that each hangs at, where these are no chain.
        at: row of the last emitted token and of each node, in the draft's order; empty where the
            pass has that order.
        resumed: what is computed of the first rows; None for nothing.
    """

    tokens: Sequence[int | DrawnToken]
    parents: list[int] | None = None
    at: Sequence[int] = ()
    resumed: Resumed | None = None


def _arranged(draft: Draft | Sequence[DrawnToken], known: Resumable) -> _Arranged:
    """A draft's rows in the order of the pass: first those whose lower layers are computed."""
    if not isinstance(draft, Draft):
        return _Arranged(draft, resumed=known.resumed)
    if draft.parents is None:
        return _Arranged(draft.token_ids, resumed=None if draft.probes else known.resumed)
    places = draft.row_of_places()
    computed = draft.computed()
    tokens = [draft.token_ids[place - 1] for place in computed]
    parents = [places[draft.parents[place - 1]] for place in computed]
    order = None if known.resumed is None or draft.probes else known.order(computed)
    if order is None:
        return _Arranged(tokens, parents)
    assert known.resumed is not None
    # Where a row ran out, a node was computed that the draft does not have, after all that it has.
    rows = known.resumed.count if known.nodes is None else 1 + len(known.nodes)
    resumed = known.resumed.first(rows)
    if order == list(range(len(order))):
        return _Arranged(tokens, parents, resumed=resumed)
    at = [0] * (1 + len(order))
    for row, number in enumerate(order, 1):
        at[1 + number] = row
    tokens, parents = [tokens[i] for i in order], [at[parents[i]] for i in order]
    return _Arranged(tokens, parents, at, resumed)


def tell(sequence: TargetSequence, decision: Decision, wanted: FeedbackWanted | None) -> Decision:
    """Tell the target's own drafter of a decision; the decision, with only the feedback that is
    sent to the text's drafter.

    Args:
        sequence: after the decision.
        decision: with the feedback that came.
        wanted: the wish that was asked of the engine; None for none. One `on_device` is of the
            target's own drafter, and nothing of it is sent.
    """
    if sequence.own is not None:
        sequence.own.note(decision, wanted)
    if wanted is not None and wanted.on_device:
        decision.feedback = None
    return decision


def _hung(draft: Draft, rows: int) -> list[int]:
    """The row of the pass that each probe hangs at.

    Args:
        draft: with probes.
        rows: of the pass before those of the probes.
    """
    places, count = draft.row_of_places(), len(draft)
    return [
        places[parent] if parent <= count else rows + parent - count - 1
        for parent in draft.probes.parents
    ]


def decide(
    sequence: TargetSequence,
    round_: int,
    drafted: Draft | Sequence[DrawnToken],
    scored: ScoredRows,
    wanted: FeedbackWanted | None,
    shaped: ShapedRows | None,
) -> Steps[Decision]:
    """The rule's verdict. The sequence is as it was."""
    request = sequence.request
    decided: DeviceVerdict = yield Decide(
        rule=request.rule,
        draft=drafted,
        scored=scored,
        sampling=request.sampling,
        carry=sequence.carry,
        numbers=sequence.numbers,
        round=round_,
        position=sequence.length - 1,
        feedback=wanted,
        shaped=shaped,
    )
    decision: Decision = yield ToHost(decided)
    if shaped is not None:
        decision = _up_to_dead_end(decision, shaped)
    if request.log_probs is not None and decision.emitted:
        decision.log_probs = yield _log_probs(request, scored, decision, shaped)
    return decision


def _keep(sequence: TargetSequence, decision: Decision, at: Sequence[int]) -> None:
    """Have the cache keep the accepted path alone; `at` has the branch row of each row of a tree,
    where these differ."""
    draft, cache = decision.draft, cache_of(sequence)
    if draft.parents is None and not draft.probes:
        cache.rollback(sequence.length + decision.num_accepted)
    else:
        rows = draft.row_of_places()
        path = [rows[place] for place in draft.path_to(decision.place)]
        cache.keep([at[row] for row in path] if at else path)


def extend(sequence: TargetSequence, decision: Decision) -> None:
    """Write a verdict into the sequence, whose cache has kept what was accepted; other sequences
    may then find it."""
    cache = cache_of(sequence)
    sequence.length += decision.num_accepted + (not decision.dead_end)
    sequence.last_token = decision.next_token
    sequence.carry = decision.carry
    sequence.token_ids += decision.emitted
    cache.publish(sequence.token_ids, len(sequence.token_ids))
    if sequence.shaped is not None:
        sequence.shaped.extend(decision.emitted)


def _log_probs(
    request: TargetRequest, scored: ScoredRows, decision: Decision, shaped: ShapedRows | None
) -> ReadLogProbs:
    """Asks for those of the emitted tokens: each at the place that it follows."""
    wanted = request.log_probs
    assert wanted is not None
    draft, emitted = decision.draft, decision.emitted
    rows = draft.row_of_places()
    places = [0, *draft.path_to(decision.place)][: len(emitted)]
    of = [rows[place] for place in places]
    if not wanted.processed:
        return ReadLogProbs(scored, of, emitted, wanted)
    own = None if shaped is None else shaped.at(of)
    return ReadLogProbs(scored, of, emitted, wanted, request.sampling, own)


def _up_to_dead_end(decision: Decision, shaped: ShapedRows) -> Decision:
    """The decision, cut at the first place of its path after which no token may come.

    What comes after such a place was decided by a distribution that no model has. The text ends
    there, so that the law of what is kept is the law up to there. Its feedback is not cut, since no
    drafter is asked any more.
    """
    draft = decision.draft
    rows = draft.row_of_places()
    for place in (0, *draft.path_to(decision.place)):
        if shaped.dead[rows[place]]:
            return replace(decision, place=place, dead_end=True)
    return decision


def _prefixes(token_ids: Sequence[int]) -> list[Sequence[int]]:
    """The path of each row of a chain."""
    return [token_ids[:end] for end in range(len(token_ids) + 1)]


def _paths(draft: Draft) -> list[Sequence[int]]:
    """The tokens on the way to each row of a pass over the last token and a draft."""
    if draft.parents is None:
        return _prefixes(draft.token_ids)
    places = (0, *draft.computed())
    return [[draft.token_ids[at - 1] for at in draft.path_to(place)] for place in places]
