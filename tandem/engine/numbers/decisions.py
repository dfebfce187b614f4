"""Drafts decided for many sequences at once, and the verdicts' way to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.answers import Decision, DeviceVerdict, Verdicts
from tandem.engine.asks import Decide
from tandem.engine.numbers.by_kernels import decided_by_kernels, numbers_by_kernels
from tandem.engine.numbers.draws import not_finite
from tandem.engine.numbers.feedback import feedback_of, kept_states, on_host
from tandem.engine.numbers.home import (
    chains_of,
    draws_of,
    rows_of,
    to_host,
    tokens_home,
    tokens_of_chains,
)
from tandem.errors import EngineFailure, InvalidRequest
from tandem.inference.feed import DrawnToken
from tandem.shaping.logits import shape
from tandem.speculation.distribution import process
from tandem.speculation.draft import NO_DRAFT, Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import foresee
from tandem.verification.kernels.chains import decide_all, decide_trees
from tandem.verification.kernels.faults import faults

# Of `Verdicts.numbers`: the place of the last kept node, next token, a number that is finite if all
# rows are, and infinite if only the rule's weights are not. Then come the overlaps, then the rule's
# state.
_HEAD = 3


def decide(asks: Sequence[Decide]) -> list[DeviceVerdict | InvalidRequest]:
    """A verdict for each ask, or what is wrong with its draft."""
    answers: list[DeviceVerdict | InvalidRequest | None] = [None] * len(asks)
    # Chains on the device were drawn here: only drafts that came to the host can be wrong.
    drafts = [ask.draft if isinstance(ask.draft, Draft) else NO_DRAFT for ask in asks]
    wrong = faults(drafts, asks[0].scored.logits.shape[1])
    for place, sentence in wrong.items():
        answers[place] = InvalidRequest(sentence)
    sound = [place for place in range(len(asks)) if place not in wrong]
    if sound:
        _foresee([asks[place] for place in sound])
    by_kernels = {place for place in sound if decided_by_kernels(asks[place])}
    probs_of = _probabilities([asks[place] for place in sound if place not in by_kernels])
    feedback = feedback_of([asks[place] for place in sound])
    # Kernels of a GPU take drafts of all lengths and shapes together. Elsewhere drafts of about one
    # length share a batch, or a long one would pad all others to its own, and chains have kernels
    # of their own. Drafts on the device are decided there.
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place in sound:
        ask, form = asks[place], None
        if place not in by_kernels:
            form = drafts[place].is_chain, len(ask.draft).bit_length()
        home = isinstance(ask.draft, Draft)
        key = id(ask.scored.logits), ask.rule, home, form, _states_key(ask)
        groups.setdefault(key, []).append(place)
    for (logits, *_), places in groups.items():
        group = [asks[place] for place in places]
        if places[0] in by_kernels:
            rule = group[0].rule
            own = _uniforms(group, max(len(ask.draft) for ask in group))
            verdicts = Verdicts(rule, [None] * len(group), numbers_by_kernels(group, own), 0)
        else:
            probs, starts = probs_of[logits]
            verdicts = _verdicts(group, probs, [starts[id(ask)] for ask in group])
        verdicts.states = kept_states(group, verdicts.numbers)
        verdicts.states_stay = group[0].feedback is not None and group[0].feedback.on_device
        for index, ask in enumerate(group):
            told = feedback.get(id(ask))
            answers[places[index]] = DeviceVerdict(verdicts, index, ask.draft, told)
    return [answer for answer in answers if answer is not None]


def _states_key(ask: Decide) -> tuple[Any, ...] | None:
    """Of verdicts that bring hidden states along: only equal ones are picked together."""
    wanted = ask.feedback
    if wanted is None or not wanted.columns:
        return None
    return wanted.columns, wanted.dtype, wanted.on_device, id(ask.scored.states)


def _foresee(asks: Sequence[Decide]) -> None:
    """The random numbers of all that have none yet, in one call."""
    unforeseen = [
        (numbers, ask.round, count)
        for ask in asks
        for numbers, count in zip(ask.numbers, (len(ask.draft), 1), strict=True)
        if count and not numbers.covers(ask.round, count)
    ]
    if unforeseen:
        foresee(unforeseen)


def _probabilities(asks: Sequence[Decide]) -> dict[int, tuple[Tensor, dict[int, int]]]:
    """For each pass, by its logits: [R, V] processed, and the first row of each ask in it."""
    sharing: dict[int, list[Decide]] = {}
    for ask in asks:
        sharing.setdefault(id(ask.scored.logits), []).append(ask)
    found = {}
    for key, group in sharing.items():
        logits = group[0].scored.logits
        rows = sum(ask.scored.count for ask in group)
        if rows < len(logits):
            places = [
                r for a in group for r in range(a.scored.first, a.scored.first + a.scored.count)
            ]
            logits = logits.index_select(
                0, torch.tensor(places).to(logits.device, non_blocking=True)
            )
        starts, first = {}, 0
        for ask in group:
            starts[id(ask)] = first
            first += ask.scored.count
        shaped = [(starts[id(ask)], ask.shaped) for ask in group if ask.shaped is not None]
        if shaped:
            logits = shape(logits, shaped)
        samplings = [ask.sampling for ask in group for _ in range(ask.scored.count)]
        found[key] = process(logits, samplings), starts
    return found


def _verdicts(asks: Sequence[Decide], probs: Tensor, starts: Sequence[int]) -> Verdicts:
    """Decide drafts that share a rule.

    Args:
        asks: of one pass.
        probs: [R, V] processed distributions.
        starts: each ask's first row of `probs`.
    """
    rule, gamma = asks[0].rule, max(len(ask.draft) for ask in asks)
    known = [ask.draft for ask in asks if isinstance(ask.draft, Draft)]
    if known and not probs.is_cuda and probs.dtype == torch.float32:
        fused = _fused(asks, known, probs, starts)
        if fused is not None:
            return fused
    if known:
        proposal = Proposal.from_drafts(known, probs.device)
    else:
        proposal = _proposal([ask.draft for ask in asks if not isinstance(ask.draft, Draft)])
    target_probs = _stack(probs, starts, [_rows_of_places(ask.draft) for ask in asks])
    uniforms = torch.from_numpy(_uniforms(asks, gamma)).to(probs.device, non_blocking=True)
    verdict = rule.verify(proposal, target_probs, uniforms, [ask.carry for ask in asks])
    packed = rule.pack(verdict.carry, gamma)
    # A logit that is no number makes its whole row so.
    check = target_probs[:, :, 0].sum(1, keepdim=True)
    if verdict.total is not None:
        check = check + torch.where(verdict.total.isfinite(), 0.0, math.inf)[:, None]
    columns = [
        verdict.place[:, None],
        verdict.next_token[:, None],
        check,
        proposal.overlaps(target_probs),
        packed.to(probs.device, non_blocking=True),  # there already, unless there are none
    ]
    numbers = torch.cat([column.double() for column in columns], dim=1)
    return Verdicts(rule, verdict.carry, numbers, packed.shape[1])


def _fused(
    asks: Sequence[Decide], drafts: Sequence[Draft], probs: Tensor, starts: Sequence[int]
) -> Verdicts | None:
    """The verdicts by a kernel of the rule, for a CPU; None where it has none for such drafts.

    Args:
        asks: as for `_verdicts`.
        drafts: theirs.
        probs: as for `_verdicts`, float32.
        starts: as for `_verdicts`.
    """
    rule, gamma = asks[0].rule, max(len(draft) for draft in drafts)
    if drafts[0].is_chain:
        if rule.kernel is None:
            return None
        own = _uniforms(asks, gamma)
        states = rule.pack([ask.carry for ask in asks], gamma).numpy()
        found = decide_all(rule.kernel, probs.numpy(), starts, drafts, own, states)
        numbers = torch.from_numpy(found)
        packed = numbers[:, _HEAD + gamma :]
        return Verdicts(rule, rule.unpack(packed), numbers, packed.shape[1])
    if rule.tree_kernel is None:
        return None
    own = _uniforms(asks, gamma)
    numbers = torch.from_numpy(decide_trees(rule.tree_kernel, probs.numpy(), starts, drafts, own))
    return Verdicts(rule, [None] * len(asks), numbers, 0)


def _proposal(chains: Sequence[Sequence[DrawnToken]]) -> Proposal:
    """Chains that are on the device, as a batch there."""
    drawn = draws_of(chains)
    rows = rows_of(chains, drawn)
    most = max(len(own) for own in rows)
    index = np.array([own + [-1] * (most - len(own)) for own in rows])
    draws = list(drawn.values())
    there = torch.from_numpy(index).to(draws[0].tokens.device, non_blocking=True)
    tokens = torch.cat([each.tokens[:: each.siblings] for each in draws])[there]
    ids = _below_each_other([each.rows.ids for each in draws])[there]
    weights = _below_each_other([each.rows.weights for each in draws])[there]
    return Proposal.from_chains(tokens, ids, weights * (there >= 0)[..., None])


def _below_each_other(rows: Sequence[Tensor]) -> Tensor:
    """Rows [*, K] of several K, padded with zeros to the widest."""
    widest = max(each.shape[1] for each in rows)
    return torch.cat([torch.nn.functional.pad(each, (0, widest - each.shape[1])) for each in rows])


def _rows_of_places(draft: Draft | Sequence[DrawnToken]) -> Sequence[int]:
    """For each place, its row in the pass over the last token and the draft."""
    return draft.row_of_places() if isinstance(draft, Draft) else range(len(draft) + 1)


def _stack(probs: Tensor, starts: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, N+1, V] from rows [R, V]: one for each place; zeros after a shorter draft's last one.

    Args:
        probs: [R, V].
        starts: each draft's first row.
        rows: for each place of each draft, its row after that one.
    """
    batch, most, first = len(rows), max(len(own) for own in rows), starts[0]
    index = [
        [start + row for row in own] + [len(probs)] * (most - len(own))
        for start, own in zip(starts, rows, strict=True)
    ]
    # Chains of one length that follow each other are there already.
    end = first + batch * most
    if end <= len(probs) and list(chain.from_iterable(index)) == list(range(first, end)):
        return probs[first:end].view(batch, most, -1)
    padded = torch.nn.functional.pad(probs, (0, 0, 0, 1))
    return padded[torch.tensor(index).to(probs.device, non_blocking=True)]


def _uniforms(asks: Sequence[Decide], gamma: int) -> np.ndarray:
    """[B, gamma+1]: column i decides row i, the last one draws what follows."""
    values = np.ones((len(asks), gamma + 1))
    for b, ask in enumerate(asks):
        if length := len(ask.draft):
            values[b, :length] = ask.numbers.accepting.take(ask.round, length)
        values[b, gamma] = ask.numbers.following.take(ask.round, 1)[0]
    return values


def decisions_of(decided: Sequence[DeviceVerdict]) -> list[Decision | EngineFailure]:
    """Each verdict on the host, and by the same copy the tokens of chains that are not there yet.
    The rows that these were drawn from come too, unless kernels drew them.

    A failure where a distribution of the drafter, or of the target, was not finite, or what the
    rule made of them.
    """
    batches = {id(each.verdicts): each.verdicts for each in decided}
    chains = [each.draft for each in decided if not isinstance(each.draft, Draft)]
    drawn = draws_of(chains)
    kept = {
        key: each.states
        for key, each in batches.items()
        if each.states is not None and not each.states_stay
    }
    told = [each.feedback for each in decided if each.feedback is not None]
    rows = {id(part): part for one in told for part in one.rows}
    others = [*(verdicts.numbers for verdicts in batches.values()), *kept.values(), *rows.values()]
    alone = tokens_home(drawn)
    if alone is None:
        there, arrays = to_host(drawn, others)
        drafts = iter(chains_of(chains, drawn, there))
    else:
        _, (tokens, *arrays) = to_host({}, [alone, *others])
        drafts = iter(tokens_of_chains(chains, drawn, tokens))
    brought = iter(arrays)
    numbers = {key: next(brought).tolist() for key in batches}
    states: dict[int, Any] = {
        key: each.states for key, each in batches.items() if each.states_stay
    } | {key: next(brought) for key in kept}
    of_rows = {key: next(brought) for key in rows}
    found = []
    for each in decided:
        draft = each.draft if isinstance(each.draft, Draft) else next(drafts)
        decision = _decision(each, draft, numbers[id(each.verdicts)][each.index])
        if each.feedback is not None and isinstance(decision, Decision):
            own = states.get(id(each.verdicts))
            decision.feedback = on_host(each, decision, own, of_rows)
        found.append(decision)
    return found


def _decision(
    decided: DeviceVerdict, draft: Draft | None, row: list[float]
) -> Decision | EngineFailure:
    if draft is None:
        return not_finite("drafter")
    place, token, check = row[:_HEAD]
    verdicts = decided.verdicts
    if math.isinf(check):
        return EngineFailure(
            f"the rule {verdicts.rule.name} gave weights that are not finite for the next token"
        )
    if not math.isfinite(check):
        return not_finite("target")
    return Decision(
        draft=draft,
        place=int(place),
        next_token=int(token),
        overlaps=row[_HEAD : _HEAD + len(draft)],
        carry=verdicts.carries[decided.index],
        levels=verdicts.rule.levels_of(row[len(row) - verdicts.carried :]),
    )
