"""What a drafter can do that draws otherwise than it says; docs/security.md says it too.

One token, exactly: a rule's law is q's mass times what it keeps, and what it draws instead.
"""

from __future__ import annotations

import pytest
import torch

from tandem.speculation.proposal import Proposal
from target_svc.verifiers import VERIFIERS

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
