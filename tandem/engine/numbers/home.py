"""What was drawn on its way to the host: as token ids, as drafts, as trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.answers import DeviceVerdict, DrawnTree
from tandem.engine.asks import ReadTokens, ToHost
from tandem.inference.feed import DrawnToken, Draws
from tandem.speculation.draft import Draft
from tandem.speculation.sampler import entries_of


def copy_to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """The tensors, of one device, as arrays: in place on a CPU, by a single copy elsewhere."""
    if not tensors or not tensors[0].is_cuda:
        return [tensor.numpy() for tensor in tensors]
    together = joined(tensors)
    home = torch.empty(together.shape, dtype=torch.uint8, pin_memory=True)
    home.copy_(together, non_blocking=True)
    torch.cuda.current_stream(together.device).synchronize()
    return [part.numpy() for part in parted(home, tensors)]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all, each from a multiple of eight on."""
    parts = []
    for tensor in tensors:
        part = tensor.contiguous().view(-1).view(torch.uint8)
        parts.append(part)
        if spare := -len(part) % 8:
            parts.append(part.new_zeros(spare))
    return torch.cat(parts)


def parted(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that were joined, on the device of their bytes."""
    found, first = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        found.append(together[first : first + size].view(tensor.dtype).view(tensor.shape))
        first += size + -size % 8
    return found


def tokens_of(asks: Sequence[ReadTokens]) -> list[list[Any]]:
    """The ids of each ask's tokens, or their shares of their rows."""
    read = {(id(one.draws), ask.shares): one.draws for ask in asks for one in ask.drawn}
    values = [_shares(draws) if shares else draws.tokens for (_, shares), draws in read.items()]
    there = dict(zip(read, (array.tolist() for array in copy_to_host(values)), strict=True))
    return [[there[id(one.draws), ask.shares][one.index] for one in ask.drawn] for ask in asks]


def _shares(draws: Draws) -> Tensor:
    """[R * siblings] float32: each token's share of its row."""
    tokens = draws.tokens.view(-1, draws.siblings)
    own = (draws.rows.ids[:, None] == tokens[..., None]) * draws.rows.weights[:, None]
    shares = (own.sum(-1) / draws.rows.weights.sum(-1, keepdim=True)).float().flatten()
    if draws.confidence is None:
        return shares
    return torch.where(draws.confidence.isnan(), shares, draws.confidence)


def drafts_of(hosts: Sequence[ToHost]) -> list[Draft | DrawnTree | None]:
    """Each sequence's draws as a draft; None where a distribution was not finite.

    Args:
        hosts: asks for draws.
    """
    drawn = draws_of([_drawn(host) for host in hosts])
    there, _ = to_host(drawn)
    chains = [_drawn(host) for host in hosts if host.places is None]
    found = iter(chains_of(chains, drawn, there))
    return [next(found) if host.places is None else tree_of(host, there) for host in hosts]


def _drawn(host: ToHost) -> Sequence[DrawnToken]:
    assert not isinstance(host.answers, DeviceVerdict)
    return host.answers


def draws_of(chains: Sequence[Sequence[DrawnToken]]) -> dict[int, Draws]:
    """What the steps drew that chains, or trees, are made of, by its identity."""
    return {id(one.draws): one.draws for chain in chains for one in chain}


def rows_of(chains: Sequence[Sequence[DrawnToken]], drawn: Mapping[int, Draws]) -> list[list[int]]:
    """Each chain's rows, among the rows of all draws."""
    firsts, count = {}, 0
    for key, draws in drawn.items():
        firsts[key] = count
        count += len(draws.tokens) // draws.siblings
    return [
        [firsts[id(one.draws)] + one.index // one.draws.siblings for one in chain]
        for chain in chains
    ]


def to_host(
    drawn: Mapping[int, Draws], others: Sequence[Tensor] = ()
) -> tuple[dict[int, Arrays], list[npt.NDArray[Any]]]:
    """Draws and other tensors as arrays, with one synchronisation."""
    parts = [part for draws in drawn.values() for part in _parts(draws)]
    arrays = iter(copy_to_host([*parts, *others]))
    found: dict[int, Arrays] = {}
    for key, draws in drawn.items():
        own = [next(arrays) for _ in _parts(draws)]
        if draws.packed is not None:
            tokens, rows = np.split(own[0], [draws.siblings], 1)
            own = [tokens.ravel(), *np.hsplit(rows, 2)]
        found[key] = own[0], own[1], own[2]
    return found, list(arrays)


def _parts(draws: Draws) -> list[Tensor]:
    """What is copied of draws."""
    if draws.packed is not None:
        return [draws.packed]
    return [draws.tokens, draws.rows.ids, draws.rows.weights]


def tokens_home(drawn: Mapping[int, Draws]) -> Tensor | None:
    """[R, 2] of all rows: the first token that was drawn, and the weight of the likeliest one, 0
    where the row was not finite. None where rows are not in an order that says it."""
    parts = []
    for each in drawn.values():
        if each.packed is not None:
            parts.append(each.packed[:, :: each.siblings + each.rows.ids.shape[1]])
        elif each.rows.ids.shape[1] == 1:
            tokens = each.tokens.view(-1, each.siblings)[:, :1]
            parts.append(torch.cat((tokens, each.rows.weights), 1))
        else:
            return None
    return torch.cat(parts) if parts else None


def tokens_of_chains(
    chains: Sequence[Sequence[DrawnToken]],
    drawn: Mapping[int, Draws],
    there: npt.NDArray[np.int64],
) -> list[Draft | None]:
    """Chains as drafts of tokens alone, up to the first row that was not finite; None where that is
    the first one.

    Args:
        chains: of single draws.
        drawn: all draws.
        there: `tokens_home`, on the host.
    """
    table = there.tolist()
    drafts: list[Draft | None] = []
    for rows in rows_of(chains, drawn):
        own = [table[row] for row in rows]
        tokens = [token for token, _ in takewhile(lambda entry: entry[1] > 0, own)]
        drafts.append(Draft.certain(tokens) if tokens or not own else None)
    return drafts


def chains_of(
    chains: Sequence[Sequence[DrawnToken]], drawn: Mapping[int, Draws], there: Mapping[int, Arrays]
) -> list[Draft | None]:
    """Chains of single draws as drafts; None where the first distribution was not finite.

    Args:
        chains: may be none.
        drawn: all draws.
        there: the same on the host.
    """
    if not chains:
        return []
    rows = [row for own in rows_of(chains, drawn) for row in own]
    columns = [arrays[0].reshape(-1, drawn[key].siblings)[:, 0] for key, arrays in there.items()]
    tokens = np.concatenate(columns)[rows]
    ids, weights = (_joined([arrays[part] for arrays in there.values()]) for part in (1, 2))
    sent = entries_of(ids, weights, np.array(rows, np.int64))
    return Draft.of_rows(tokens, *sent, [len(chain) for chain in chains])


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The rows of all, padded with zeros to one width."""
    widest = max(array.shape[-1] for array in arrays)
    if any(array.shape[1] < widest for array in arrays):
        arrays = [np.pad(array, ((0, 0), (0, widest - array.shape[1]))) for array in arrays]
    return np.concatenate(arrays)


# What one step drew, on the host: tokens, ids and weights of its rows.
Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def tree_of(host: ToHost, there: Mapping[int, Arrays]) -> DrawnTree | None:
    """The draft of a tree; None where its first distribution was not finite.

    Where earlier siblings used up a row, nothing is drawn, and the subtree is empty; so it is
    after a row that is not finite. Only earlier draws decide this, so it does not bias the text.

    Args:
        host: the ask.
        there: each step's draws, by their identity.
    """
    assert not isinstance(host.answers, DeviceVerdict)
    assert host.places is not None
    tokens: list[int] = []
    parents: list[int] = []
    row_of: list[int] = []
    draws: list[int] = []
    places = {0: 0}
    rows: dict[tuple[int, int, int], int] = {}
    parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    taken: dict[int, set[int]] = {}
    for index, (drawn, hung) in enumerate(zip(host.answers, host.places, strict=True)):
        place = places.get(hung)
        if place is None:
            continue
        all_tokens, all_ids, all_weights = there[id(drawn.draws)]
        row, rank = divmod(drawn.index, drawn.draws.siblings)
        token = int(all_tokens[drawn.index])
        sent = all_weights[row] > 0
        ids, weights = all_ids[row][sent], all_weights[row][sent]
        siblings = taken.setdefault(place, set())
        if not len(ids):
            if not draws:
                return None
            continue
        if drawn.draws.certain:
            ids, weights = ids[:0], weights[:0]
        elif host.distinct and (token in siblings or token not in ids):
            continue
        if host.distinct and token in siblings:
            continue
        # A certain row belongs to one token; others are shared by all that were drawn from them.
        key = (id(drawn.draws), drawn.draws.shared(row), rank if drawn.draws.certain else 0)
        if key not in rows:
            rows[key] = len(parts)
            parts.append((ids[:0], weights[:0]) if len(ids) == 1 else (ids, weights))
        siblings.add(token)
        tokens.append(token)
        parents.append(place)
        row_of.append(rows[key])
        draws.append(index)
        places[index + 1] = len(tokens)
    draft = Draft(
        token_ids=tokens,
        sizes=[len(ids) for ids, _ in parts],
        ids=np.concatenate([ids for ids, _ in parts]).astype(np.uint32),
        weights=np.concatenate([weights for _, weights in parts]).astype(np.uint16),
        parents=parents,
        row_of=row_of,
        distinct=host.distinct,
    )
    return DrawnTree(draft, draws)
