"""Which vocabulary token ids belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 over the token-to-id table, which must be equal in a pair."""
    table = sorted(vocabulary.items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()
