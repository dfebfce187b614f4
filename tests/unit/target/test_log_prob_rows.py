"""The rows that log probabilities are read from: of each emitted token, the one after its path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.speculation.draft import Draft
from tandem.speculation.request.log_probs import LogProbsWanted
from target_svc import round as rounds

# Tokens with their parents: a chain, chains that are merged where they agree, a tree with twins.
DRAFTS = {
    "chain": ([5, 6, 7], None),
    "merged chains": ([5, 5, 6, 6, 7, 8], [0, 0, 1, 2, 3, 4]),
    "tree": ([5, 5, 6, 9, 9, 4], [0, 0, 0, 2, 2, 5]),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_each_emitted_token_is_read_behind_the_text_before_it(kind: str) -> None:
    tokens, parents = DRAFTS[kind]
    draft = Draft.certain(tokens, parents)
    paths = [list(path) for path in rounds._paths(draft)]
    for place in range(len(tokens) + 1):
        emitted = draft.emitted(place, 3)
        decision: Any = SimpleNamespace(draft=draft, place=place, emitted=emitted)
        nothing: Any = None
        request: Any = SimpleNamespace(log_probs=LogProbsWanted(2))
        ask = rounds._log_probs(request, nothing, decision, None)
        assert list(ask.token_ids) == emitted
        assert [paths[row] for row in ask.rows] == [emitted[:end] for end in range(len(emitted))]
