"""Rows, trees and small laws to try lossy rules on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.verification import Verifier

VOCAB_SIZE = 6


def random_rows(rng: np.random.Generator, count: int) -> Tensor:
    """[count, V] rows from sharp to flat, with zeros."""
    logits = rng.normal(size=(count, VOCAB_SIZE)) * rng.choice([0.3, 2.0, 6.0], size=(count, 1))
    rows = torch.from_numpy(logits).softmax(-1)
    rows[rows < 0.005] = 0
    return rows / rows.sum(-1, keepdim=True)


def random_tree(rng: random.Random, count: int) -> Draft:
    """Distinct siblings at random places, all certain."""
    parents: list[int] = []
    tokens: list[int] = []
    taken: set[tuple[int, int]] = set()
    while len(tokens) < count:
        place, token = rng.randrange(len(tokens) + 1), rng.randrange(VOCAB_SIZE)
        if (place, token) not in taken:
            taken.add((place, token))
            parents.append(place)
            tokens.append(token)
    empty = np.zeros(0)
    return Draft(
        tokens,
        [0] * count,
        empty.astype(np.uint32),
        empty.astype(np.uint16),
        parents,
        list(range(count)),
        True,
    )


Tables = dict[tuple[int, ...], Tensor]
# The drafts after a text, each with its chance.
Drafts = Callable[[tuple[int, ...]], Iterable[tuple[Draft, float]]]


def random_tables(rng: np.random.Generator, longest: int) -> Tables:
    """A row of three tokens after each text of up to so many tokens."""
    texts = [text for n in range(longest + 1) for text in product(range(3), repeat=n)]
    return {text: torch.from_numpy(rng.normal(size=3)).softmax(-1) for text in texts}


def law_of(rule: Verifier[Any], tables: Tables, drafts: Drafts, length: int) -> dict[Any, float]:
    """The law of a text, for a rule whose acceptance is not random."""
    law: dict[tuple[int, ...], float] = {}

    def extend(text: tuple[int, ...], mass: float) -> None:
        if len(text) >= length:
            law[text[:length]] = law.get(text[:length], 0.0) + mass
            return
        for draft, chance in drafts(text):
            places = [text, *((*text, *draft.token_ids[: n + 1]) for n in range(len(draft)))]
            p = torch.stack([tables[place] for place in places])[None]
            proposal = Proposal.from_drafts([draft])
            uniforms = torch.zeros(1, len(draft) + 1, dtype=torch.float64)
            place = rule.verify(proposal, p, uniforms).place
            kept = tuple(draft.token_ids[: int(place)])
            weights = rule.residual_weights(proposal, p, place)[0]
            for token, share in enumerate((weights / weights.sum()).tolist()):
                if share:
                    extend((*text, *kept, token), mass * chance * share)

    extend((), 1.0)
    return law
