"""Verdicts by kernels of a GPU, where drafts and rules are such that these can decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.engine.asks import Decide
from tandem.engine.numbers.home import draws_of, rows_of
from tandem.inference.feed import DrawnToken, Draws
from tandem.kernels import draws, operators, verdicts
from tandem.shaping.logits import shape
from tandem.speculation.draft import Draft
from tandem.speculation.tree_batch import walk_of
from tandem.verification import Verifier
from tandem.verification.kernels.chains import decide_block, decide_token
from tandem.verification.kernels.trees import decide_block_tree, decide_token_tree

# Rules that kernels know, by their own forms for a CPU: a subclass may have changed the rule.
_RULES: dict[Callable[..., Any] | None, str] = {decide_block: "block", decide_token: "token"}
_OF_TREES = decide_block_tree, decide_token_tree
# Most nodes of a draft.
_MOST = 64


def decided_by_kernels(ask: Decide) -> bool:
    """Whether kernels decide this draft: they take children of a place that share a row, or are
    all certain.
    """
    logits, draft = ask.scored.logits, ask.draft
    return (
        operators.take(logits)
        and ask.rule.kernel in _RULES
        and len(draft) <= _MOST
        and (_fits(ask.rule, draft) if isinstance(draft, Draft) else _chain_fits(draft))
    )


def _chain_fits(chain: Sequence[DrawnToken]) -> bool:
    return all(one.draws.rows.ids.shape[1] <= draws.WIDEST for one in chain)


def _fits(rule: Verifier[Any], draft: Draft) -> bool:
    if max(draft.sizes, default=0) > draws.WIDEST:
        return False
    if draft.is_chain:
        return True
    if rule.tree_kernel not in _OF_TREES:
        return False
    rows: dict[int, set[int]] = {}
    for place, row in zip(draft.places(), draft.rows_of_nodes(), strict=True):
        rows.setdefault(place, set()).add(row if draft.sizes[row] else -1)
    one_each = all(len(own) == 1 for own in rows.values())
    return one_each and (draft.distinct or len(draft.computed()) == len(draft))


def numbers_by_kernels(asks: Sequence[Decide], uniforms: npt.NDArray[np.float64]) -> Tensor:
    """[B, N]: see `Verdicts.numbers`.

    Args:
        asks: of one pass and one rule; their drafts are all on the device, or all on the host.
        uniforms: [B, N+1] for drafts up to N nodes, as in `Verifier.verify`.
    """
    logits, rule = asks[0].scored.logits, _RULES[asks[0].rule.kernel]
    places: Sequence[int] = [
        row for ask in asks for row in range(ask.scored.first, ask.scored.first + ask.scored.count)
    ]
    firsts = np.cumsum([0, *(ask.scored.count for ask in asks)])[:-1].tolist()
    shaped = [
        (first, ask.shaped)
        for first, ask in zip(firsts, asks, strict=True)
        if ask.shaped is not None
    ]
    if shaped:
        there = torch.tensor(places).to(logits.device, non_blocking=True)
        logits, places = shape(logits.index_select(0, there), shaped), range(len(places))
    samplings = [ask.sampling for ask in asks for _ in range(ask.scored.count)]
    wanted = draws.asked_of(places, logits.shape[1], samplings)
    nodes, rows = _drafted(asks, logits.device)
    distinct = [isinstance(ask.draft, Draft) and ask.draft.distinct for ask in asks]
    asked = verdicts.asked_of(firsts, distinct, uniforms, nodes)
    # One copy to the device.
    both = torch.from_numpy(np.concatenate((wanted.ravel(), asked.ravel())))
    sent = both.to(logits.device, non_blocking=True)
    of_places = sent[: wanted.size].view(wanted.shape)
    of_texts = sent[wanted.size :].view(asked.shape)
    laws = draws.laws(logits, of_places)
    return verdicts.decide(logits, laws, of_places, of_texts, rows, rule)


# Of a draft's nodes: parents, order, rows, tokens, as `verdicts.asked_of` takes them.
Nodes = Sequence[Sequence[int]]


def _drafted(asks: Sequence[Decide], device: torch.device) -> tuple[list[Nodes], Tensor]:
    """The nodes of each draft, and the rows of all."""
    host = [ask.draft for ask in asks if isinstance(ask.draft, Draft)]
    most = max(len(ask.draft) for ask in asks)
    if host:
        return _on_host(host, most, device)
    chains = [ask.draft for ask in asks if not isinstance(ask.draft, Draft)]
    drawn = draws_of(chains)
    siblings = max(each.siblings for each in drawn.values())
    widest = max(each.rows.ids.shape[1] for each in drawn.values())
    width = verdicts.width_of(max(widest, most))
    rows = torch.cat([_packed(each, siblings, width) for each in drawn.values()])
    nodes: list[Nodes] = []
    for chain, own in zip(chains, rows_of(chains, drawn), strict=True):
        count = len(chain)
        ranks = [-1 - one.index % one.draws.siblings for one in chain]
        nodes.append((range(count), range(count - 1, -1, -1), own, ranks))
    return nodes, rows


def _packed(drawn: Draws, siblings: int, width: int) -> Tensor:
    """[R, siblings + 2 width]: tokens, ids, weights."""
    if drawn.packed is not None and drawn.packed.shape[1] == siblings + 2 * width:
        return drawn.packed
    tokens = drawn.tokens.view(-1, drawn.siblings)
    fill = (0, width - drawn.rows.ids.shape[1])
    parts = pad(tokens, (0, siblings - drawn.siblings)), drawn.rows.ids, drawn.rows.weights
    return torch.cat((parts[0], pad(parts[1], fill), pad(parts[2], fill)), 1)


def _on_host(
    drafts: Sequence[Draft], most: int, device: torch.device
) -> tuple[list[Nodes], Tensor]:
    widest = max((size for draft in drafts for size in draft.sizes), default=0)
    width = verdicts.width_of(max(widest, most))
    sizes = np.array([size for draft in drafts for size in draft.sizes], np.int64)
    rows = np.zeros((len(sizes), 2, width), np.int64)
    sent = np.arange(width) < sizes[:, None]
    rows[:, 0][sent] = np.concatenate([draft.ids for draft in drafts])
    rows[:, 1][sent] = np.concatenate([draft.weights for draft in drafts])
    nodes: list[Nodes] = []
    first = 0
    for draft in drafts:
        row_of = [first + row if draft.sizes[row] else -1 for row in draft.rows_of_nodes()]
        nodes.append((draft.places(), walk_of(draft.places()), row_of, draft.token_ids))
        first += len(draft.sizes)
    there = torch.from_numpy(rows.reshape(len(sizes), 2 * width))
    return nodes, there.to(device, non_blocking=True)
