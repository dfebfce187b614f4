"""Drafts decided for many sequences at once, and the verdicts' way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engine.asks import Decide, Decision, DeviceVerdict, Verdicts
from tandem.engine.draws import copy_to_host
from tandem.errors import InvalidRequest
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft, faults
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import foresee
from tandem.verification.kernels.chains import decide_all, decide_trees

# Of `Verdicts.numbers`: the place of the last kept node, next token, a number that is finite if all
# rows are. Then come the overlaps, then the rule's state.
_HEAD = 3


def decide(asks: Sequence[Decide]) -> list[DeviceVerdict | InvalidRequest]:
    """A verdict for each ask, or what is wrong with its draft."""
    answers: list[DeviceVerdict | InvalidRequest | None] = [None] * len(asks)
    wrong = faults([ask.draft for ask in asks], asks[0].scored.logits.shape[1])
    for place, sentence in wrong.items():
        answers[place] = InvalidRequest(sentence)
    sound = [place for place in range(len(asks)) if place not in wrong]
    if sound:
        _foresee([asks[place] for place in sound])
    probs_of = _probabilities([asks[place] for place in sound])
    # Drafts of about one length share a batch, or a long one would pad all others to its own.
    # Chains are decided apart from trees, by what is made for them.
    groups: dict[tuple[int, str, bool, int], list[int]] = {}
    for place in sound:
        ask = asks[place]
        size = len(ask.draft).bit_length()
        key = (id(ask.scored.logits), ask.rule.name, ask.draft.is_chain, size)
        groups.setdefault(key, []).append(place)
    for (logits, *_), places in groups.items():
        probs, starts = probs_of[logits]
        group = [asks[place] for place in places]
        verdicts = _verdicts(group, probs, [starts[id(ask)] for ask in group])
        for index, place in enumerate(places):
            answers[place] = DeviceVerdict(verdicts, index, asks[place].draft)
    return [answer for answer in answers if answer is not None]


def _foresee(asks: Sequence[Decide]) -> None:
    """The random numbers of all that have none yet, in one call."""
    unforeseen = [
        (numbers, ask.round, count)
        for ask in asks
        for numbers, count in ((ask.accepting, len(ask.draft)), (ask.following, 1))
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
            logits = logits.index_select(0, torch.tensor(places).to(logits.device))
        starts, first = {}, 0
        for ask in group:
            starts[id(ask)] = first
            first += ask.scored.count
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
    rule, lengths = asks[0].rule, [len(ask.draft) for ask in asks]
    gamma = max(lengths)
    drafts = [ask.draft for ask in asks]
    fusable = not probs.is_cuda and probs.dtype == torch.float32
    tree_kernel = None if drafts[0].is_chain else rule.tree_kernel
    if fusable and tree_kernel is not None:
        own = _uniforms(asks, gamma)
        numbers = torch.from_numpy(decide_trees(tree_kernel, probs.numpy(), starts, drafts, own))
        return Verdicts(rule, [None] * len(asks), numbers, 0)
    kernel = rule.kernel if drafts[0].is_chain else None
    if fusable and kernel is not None:
        own = _uniforms(asks, gamma)
        states = rule.pack([ask.carry for ask in asks], gamma).numpy()
        numbers = torch.from_numpy(decide_all(kernel, probs.numpy(), starts, drafts, own, states))
        packed = numbers[:, _HEAD + gamma :]
        return Verdicts(rule, rule.unpack(packed), numbers, packed.shape[1])
    target_probs = _stack(probs, starts, drafts, gamma)
    proposal = Proposal.from_drafts(drafts, probs.device)
    uniforms = torch.from_numpy(_uniforms(asks, gamma)).to(probs.device, non_blocking=True)
    verdict = rule.verify(proposal, target_probs, uniforms, [ask.carry for ask in asks])
    packed = rule.pack(verdict.carry, gamma)
    columns = [
        verdict.place[:, None],
        verdict.next_token[:, None],
        # A logit that is no number makes its whole row so.
        target_probs[:, :, 0].sum(1, keepdim=True),
        proposal.overlaps(target_probs),
        packed.to(probs.device, non_blocking=True),  # there already, unless there are none
    ]
    numbers = torch.cat([column.double() for column in columns], dim=1)
    return Verdicts(rule, verdict.carry, numbers, packed.shape[1])


def _stack(probs: Tensor, starts: Sequence[int], drafts: Sequence[Draft], most: int) -> Tensor:
    """[B, N+1, V] from rows [R, V]: one for each place; zeros behind a shorter draft's last one."""
    batch, first = len(starts), starts[0]
    if all(
        draft.is_chain and len(draft) == most and start == first + b * (most + 1)
        for b, (draft, start) in enumerate(zip(drafts, starts, strict=True))
    ):
        return probs[first : first + batch * (most + 1)].view(batch, most + 1, -1)
    index = [
        [start + row for row in draft.row_of_places()] + [len(probs)] * (most - len(draft))
        for draft, start in zip(drafts, starts, strict=True)
    ]
    padded = torch.nn.functional.pad(probs, (0, 0, 0, 1))
    return padded[torch.tensor(index).to(probs.device, non_blocking=True)]


def _uniforms(asks: Sequence[Decide], gamma: int) -> np.ndarray:
    """[B, gamma+1]: column i decides row i, the last one draws what follows."""
    values = np.ones((len(asks), gamma + 1))
    for b, ask in enumerate(asks):
        if length := len(ask.draft):
            values[b, :length] = ask.accepting.take(ask.round, length)
        values[b, gamma] = ask.following.take(ask.round, 1)[0]
    return values


def decisions_of(decided: Sequence[DeviceVerdict]) -> list[Decision | None]:
    """Each verdict on the host; None where a distribution was not finite."""
    batches = {id(d.verdicts): d.verdicts for d in decided}
    arrays = copy_to_host([verdicts.numbers for verdicts in batches.values()])
    rows_of = {key: array.tolist() for key, array in zip(batches, arrays, strict=True)}
    return [_decision(d, rows_of[id(d.verdicts)][d.index]) for d in decided]


def _decision(decided: DeviceVerdict, row: list[float]) -> Decision | None:
    place, token, check = row[:_HEAD]
    if not np.isfinite(check):
        return None
    verdicts, draft = decided.verdicts, decided.draft
    return Decision(
        int(place),
        len(draft.path_to(int(place))),
        int(token),
        row[_HEAD : _HEAD + len(draft)],
        verdicts.carries[decided.index],
        verdicts.rule.levels_of(row[len(row) - verdicts.carried :]),
    )
