"""What common.proto requires of a draft, coded naively: the service's checks must agree with it."""

from __future__ import annotations

from tandem.common.v1 import common_pb2


def breaks(
    draft: common_pb2.Draft, vocab_size: int, max_gamma: int, max_nodes: int, probe_tokens: int
) -> bool:
    """Whether a draft is not what it says, or larger than it may be.

    Args:
        draft: any.
        vocab_size: the target's.
        max_gamma: the greatest depth.
        max_nodes: the most candidates and probes; 0 allows chains without probes alone.
        probe_tokens: extra embeddings.
    """
    tokens, count = list(draft.token_ids), len(draft.token_ids)
    most = max_nodes if draft.parents and max_nodes else max_gamma
    if count > most or any(token >= vocab_size for token in tokens):
        return True
    parents = list(draft.parents) or list(range(count))
    if len(parents) != count or any(parent > i for i, parent in enumerate(parents)):
        return True
    chain = parents == list(range(count))
    if not chain and not max_nodes:
        return True
    probes = draft.probes
    if len(probes.token_ids) != len(probes.parents):
        return True
    if len(probes.token_ids) > max(max_nodes - count, 0):
        return True
    twins = {
        i + 1
        for i in range(count)
        if (parents[i], tokens[i]) in zip(parents[:i], tokens[:i], strict=True)
    }
    for number, (token, place) in enumerate(zip(probes.token_ids, probes.parents, strict=True)):
        if token >= vocab_size + probe_tokens or place > count + number or place in twins:
            return True
    return _hangs_badly(draft, tokens, parents, max_gamma) or _has_bad_rows(draft, vocab_size)


def _hangs_badly(
    draft: common_pb2.Draft, tokens: list[int], parents: list[int], max_gamma: int
) -> bool:
    chain = parents == list(range(len(tokens)))
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    if max(depth) > max_gamma:
        return True
    for i in range(len(tokens)):
        twin = (parents[i], tokens[i]) in zip(parents[:i], tokens[:i], strict=True)
        if twin and ((draft.distinct_siblings and not chain) or i + 1 in parents):
            return True
    return False


def _has_bad_rows(draft: common_pb2.Draft, vocab_size: int) -> bool:
    count, sizes = len(draft.token_ids), list(draft.rows.sizes)
    data, weights = draft.rows.ids, draft.rows.weights
    if not sizes and not data and not weights:
        sizes = [0] * count
    row_of = list(draft.row_of) or list(range(count))
    if len(row_of) != count or set(row_of) != set(range(len(sizes))):
        return True
    if len(data) != 4 * sum(sizes) or len(weights) != 2 * sum(sizes):
        return True
    first = 0
    for row, size in enumerate(sizes):
        entries = range(first, first + size)
        first += size
        ids = [int.from_bytes(data[4 * i : 4 * i + 4], "little") for i in entries]
        if len(set(ids)) < size or any(token >= vocab_size for token in ids):
            return True
        if any(weights[2 * i : 2 * i + 2] == b"\0\0" for i in entries):
            return True
        named = {draft.token_ids[i] for i in range(count) if row_of[i] == row}
        if len(named) > 1 if not size else not named <= set(ids):
            return True
    return False
