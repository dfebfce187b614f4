"""Which vocabulary token ids belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 over the token-to-id table, which must be equal in a pair."""
    table = sorted(vocabulary.items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def ids_without_token(vocabulary: Mapping[str, int], size: int) -> list[int]:
    """Ids below `size` that no token has: rows that pad a model's vocabulary, and holes in it."""
    return sorted({*range(size)}.difference(vocabulary.values()))


def difference(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    """The first id with another token in another vocabulary, and how many tokens both have; empty
    where all are the same."""
    if one == other:
        return ""
    by_id = [{token_id: token for token, token_id in each.items()} for each in (one, other)]
    first = min(i for i in {*by_id[0], *by_id[1]} if by_id[0].get(i) != by_id[1].get(i))
    tokens = [repr(each[first]) if first in each else "no token" for each in by_id]
    return (
        f"id {first} is {tokens[0]} in one and {tokens[1]} in the other, of {len(one)} and"
        f" {len(other)} tokens"
    )
