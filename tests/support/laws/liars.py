"""Drafters, as tables, that do not draw from the rows that they send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tests.support.laws.laws import Tables


@dataclass(frozen=True)
class LyingTables(Tables):
    """Tables of a lying drafter: drafts are drawn from `drawn`, but `q` is sent.

    Attributes:
        drawn: rows after every prefix; with tokens of q's row only, else a target would refuse.
    """

    drawn: Tensor

    def block(self, prefixes: Tensor, drafts: Tensor) -> tuple[Proposal, Tensor, Tensor]:
        proposal, target_probs, _ = super().block(prefixes, drafts)
        weight = torch.ones(len(prefixes), dtype=torch.float64)
        for i in range(drafts.shape[1]):
            weight = weight * self.drawn[prefixes].gather(1, drafts[:, [i]])[:, 0]
            prefixes = self.extend(prefixes, drafts[:, i])
        return proposal, target_probs, weight


Liar = Callable[[Tables], LyingTables]


def wanted(tables: Tables) -> Tensor:
    """The token that a liar wants after each prefix: the least likely one that is possible."""
    possible = tables.p.masked_fill(tables.p == 0, torch.inf)
    return possible.argmin(-1)


def wanted_text(tables: Tables, length: int) -> int:
    """The index of the text of wanted tokens among all texts of a length."""
    text, prefix = 0, torch.tensor(0)
    for _ in range(length):
        token = int(wanted(tables)[prefix])
        text, prefix = text * tables.vocab_size + token, tables.extend(prefix, token)
    return text


def _one_hot(tables: Tables, tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, tables.vocab_size).double()


def argmax_drafted(tables: Tables) -> LyingTables:
    """Sends its likeliest token with the row that it should have drawn from: a common mistake."""
    drawn = _one_hot(tables, tables.q.argmax(-1))
    return LyingTables(tables.vocab_size, tables.p, tables.q, drawn)


def stale_rows(tables: Tables) -> LyingTables:
    """Draws from its own rows, and sends the rows of one token earlier."""
    prefixes = torch.arange(len(tables.q))
    before = ((prefixes - 1) // tables.vocab_size).clamp(min=0)
    return LyingTables(tables.vocab_size, tables.p, tables.q[before], tables.q)


def half_the_truth(tables: Tables) -> LyingTables:
    """Draws from the row that it sends half of the time, else sends the token that it wants."""
    drawn = (tables.q + _one_hot(tables, wanted(tables))) / 2
    return LyingTables(tables.vocab_size, tables.p, tables.q, drawn)


def wanted_drafted(tables: Tables) -> LyingTables:
    """Knows the target: sends the target's own row, with the token that it wants."""
    drawn = _one_hot(tables, wanted(tables))
    return LyingTables(tables.vocab_size, tables.p, tables.p, drawn)


def scapegoat_drafted(tables: Tables) -> LyingTables:
    """Knows the target: sends a scapegoat to be rejected, so that the wanted token corrects it.

    The row is the target's own, but the wanted token's share is added to the scapegoat's. Only for
    the wanted token does p exceed the row, so a rejection is certainly corrected to it.
    """
    token = wanted(tables)[:, None]
    goat = tables.p.scatter(1, token, torch.inf).argmin(-1, keepdim=True)
    said = tables.p.scatter(1, token, 0.0).scatter_add(1, goat, tables.p.gather(1, token))
    return LyingTables(tables.vocab_size, tables.p, said, _one_hot(tables, goat[:, 0]))


LIARS: dict[str, Liar] = {
    liar.__name__: liar
    for liar in (argmax_drafted, stale_rows, half_the_truth, wanted_drafted, scapegoat_drafted)
}


def total_variation(law: Tensor, other: Tensor) -> float:
    """Total variation distance of two laws of texts."""
    return float((law - other).abs().sum() / 2)
