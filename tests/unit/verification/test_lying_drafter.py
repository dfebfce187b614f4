"""What a drafter can do if it does not draw from the q that it reports (see docs/security.md).

First one token, exactly: a rule's law is q's mass times what it keeps, plus what it draws instead.
Then whole texts over several rounds, by enumeration of the rules in production.
"""

from __future__ import annotations

import re

import pytest
import torch

from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS
from tests.support.laws.laws import Tables, speculative_law
from tests.support.laws.liars import LIARS, total_variation, wanted_text
from tests.support.repository import ROOT

_TARGET = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
_SIZE = len(_TARGET)


def law(name: str, said: torch.Tensor, drawn: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of the text's next token, where drafts come from `drawn` and are said to come from `said`."""
    rule, emitted = VERIFIERS[name], torch.zeros(_SIZE, dtype=torch.float64)
    rows = torch.stack([target, target])[None]
    for token in range(_SIZE):
        if not drawn[token]:
            continue
        proposal = Proposal.from_dense(torch.tensor([[token]]), said[None, None])
        kept = float(rule.accept_probabilities(proposal, rows, [None])[0, 0])
        instead = rule.residual_weights(proposal, rows, torch.tensor([0]), [None])[0]
        emitted[token] += drawn[token] * kept
        if kept < 1:
            emitted += drawn[token] * (1 - kept) * instead / instead.sum()
    return emitted


def one_hot(token: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), _SIZE).double()


@pytest.mark.parametrize("name", ["block", "token"])
def test_an_honest_one_changes_nothing(name: str) -> None:
    said = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1], dtype=torch.float64)
    assert torch.allclose(law(name, said, said, _TARGET), _TARGET, atol=1e-12)


@pytest.mark.parametrize("name", ["block", "token"])
@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_a_liar_has_any_token_kept_that_the_target_may_say(name: str, wanted: int) -> None:
    """It says that it drew from the target's own law, and always sends the one that it wants."""
    found = law(name, _TARGET, one_hot(wanted), _TARGET)
    assert torch.allclose(found, one_hot(wanted), atol=1e-12)


@pytest.mark.parametrize("name", ["block", "token"])
def test_it_has_no_other_kept(name: str) -> None:
    """Whatever it says of a token to which the target gives nothing."""
    for share in (1.0, 0.5, 1e-4):
        said = share * one_hot(4) + (1 - share) * _TARGET
        assert law(name, said, one_hot(4), _TARGET)[4] == 0.0


@pytest.mark.parametrize("name", ["block", "token"])
def test_at_temperature_0_it_changes_nothing(name: str) -> None:
    greedy = one_hot(0)
    for said in (_TARGET, one_hot(1), one_hot(0)):
        for wanted in range(_SIZE):
            if said[wanted]:  # else it is refused before it is decided
                assert torch.equal(law(name, said, one_hot(wanted), greedy), greedy)


def cut(tables: Tables) -> Tables:
    """The target says the two likeliest tokens alone, as with top_k = 2."""
    kept = torch.zeros_like(tables.p).scatter(1, tables.p.topk(2, -1).indices, 1.0)
    p = tables.p * kept
    return Tables(tables.vocab_size, p / p.sum(-1, keepdim=True), tables.q)


# Texts of five tokens, in rounds of three drafted ones; one of them is what a liar wants.
_VOCAB_SIZE, _LENGTH, _GAMMA = 4, 5, 3
_FULL = Tables.random(_VOCAB_SIZE, _LENGTH + _GAMMA, seed=3, zeros=False)
_TABLES = cut(_FULL)
_HONEST = _TABLES.autoregressive_law(_LENGTH)
_WANTED = wanted_text(_TABLES, _LENGTH)


def law_of_texts(
    name: str, liar: str, tables: Tables = _TABLES, gamma: int = _GAMMA
) -> torch.Tensor:
    rule = VERIFIERS[name]
    lying = LIARS[liar](tables)
    return speculative_law(rule, lying, gamma, _LENGTH, capped=rule.needs_every_draft)


# Total variation from the honest law, and the wanted text's chance.
TEXTS: list[tuple[str, str, float, float]] = [
    ("argmax_drafted", "block", 0.6913, 9.279e-05),
    ("argmax_drafted", "token", 0.6905, 0.001019),
    ("argmax_drafted", "greedy_block", 0.6012, 0),
    ("stale_rows", "block", 0.3058, 0.0001292),
    ("stale_rows", "token", 0.2975, 0.0002376),
    ("stale_rows", "greedy_block", 0.3230, 0.0003944),
    ("half_the_truth", "block", 0.5963, 0.07014),
    ("half_the_truth", "token", 0.5541, 0.06325),
    ("half_the_truth", "greedy_block", 0.5991, 0.08066),
    ("wanted_drafted", "block", 0.9958, 0.2902),
    ("wanted_drafted", "token", 0.9958, 0.2902),
    ("wanted_drafted", "greedy_block", 0.9958, 0.2902),
    ("scapegoat_drafted", "block", 0.9982, 1),
    ("scapegoat_drafted", "token", 0.9982, 1),
    ("scapegoat_drafted", "greedy_block", 0.9982, 1),
]


@pytest.mark.parametrize("name", ["block", "token", "greedy_block"])
def test_an_honest_ones_texts_follow_the_targets_law(name: str) -> None:
    rule = VERIFIERS[name]
    found = speculative_law(rule, _TABLES, _GAMMA, _LENGTH, capped=rule.needs_every_draft)
    assert torch.allclose(found, _HONEST, atol=1e-12)


@pytest.mark.parametrize(("liar", "name", "distance", "chance"), TEXTS)
def test_what_a_lie_makes_of_whole_texts(
    liar: str, name: str, distance: float, chance: float
) -> None:
    found = law_of_texts(name, liar)
    assert float(found.sum()) == pytest.approx(1)
    assert total_variation(found, _HONEST) == pytest.approx(distance, abs=5e-4)
    assert float(found[_WANTED]) == pytest.approx(chance, rel=5e-3)


def test_the_page_has_these_figures() -> None:
    page = ROOT.joinpath("docs", "security.md").read_text()
    section = page.partition("### The effect of a lying drafter")[2].partition("\n## ")[0]
    assert f"is {float(_HONEST[_WANTED]):.4f}" in section
    told = re.findall(r"(\d\.\d{3}), (\d\.\d{4})", section)
    assert told == [(f"{distance:.3f}", f"{chance:.4f}") for _, _, distance, chance in TEXTS]


@pytest.mark.parametrize("name", ["block", "token"])
def test_a_short_draft_forces_a_text_as_well(name: str) -> None:
    """A token without any chance is rejected for sure, and its row chooses what replaces it."""
    found = law_of_texts(name, "scapegoat_drafted", gamma=1)
    assert float(found[_WANTED]) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", ["block", "token"])
def test_a_liar_hits_a_full_law_too(name: str) -> None:
    """Each token may come: what is to be rejected is kept now and then."""
    honest = _FULL.autoregressive_law(_LENGTH)
    found = law_of_texts(name, "wanted_drafted", _FULL)
    assert total_variation(found, honest) > 0.99


@pytest.mark.parametrize("name", ["block", "token", "greedy_block"])
@pytest.mark.parametrize("liar", LIARS)
def test_no_text_comes_that_the_target_cannot_say(name: str, liar: str) -> None:
    assert float(law_of_texts(name, liar)[_HONEST == 0].sum()) == 0.0


@pytest.mark.parametrize("name", ["block", "token", "greedy_block"])
@pytest.mark.parametrize("liar", LIARS)
def test_at_temperature_0_no_lie_changes_a_text(name: str, liar: str) -> None:
    likeliest = torch.nn.functional.one_hot(_TABLES.p.argmax(-1), _VOCAB_SIZE).double()
    tables = Tables(_VOCAB_SIZE, likeliest, _TABLES.q)
    found = law_of_texts(name, liar, tables)
    assert torch.allclose(found, tables.autoregressive_law(_LENGTH), atol=1e-12)
