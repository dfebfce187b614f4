"""Divergences against their definitions, over whole vocabularies and a few tokens of each row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.distillation.divergences import TargetRows, discounted, loss, tvd

NAMES = ("forward-kl", "reverse-kl", "jsd", "tvd")


def rows(seed: int) -> Tensor:
    return 2 * torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(seed))


def written_out(name: str, p: list[float], q: list[float]) -> float:
    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x)

    mean = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return {
        "forward-kl": kl(p, q),
        "reverse-kl": kl(q, p),
        "jsd": (kl(p, mean) + kl(q, mean)) / 2,
        "tvd": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_divergence_is_what_it_says(name: str) -> None:
    target, drafter = rows(0), rows(1)
    found = loss(name, drafter, TargetRows(target.log_softmax(-1)), torch.zeros(3, 4).long())
    for at in ((0, 0), (1, 2), (2, 3)):
        p, q = (each[at].double().softmax(-1).tolist() for each in (target, drafter))
        assert float(found[at]) == pytest.approx(written_out(name, p, q), abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top", [1, 3, 8])
def test_of_a_few_tokens_it_is_a_lower_bound(name: str, top: int) -> None:
    target, drafter = rows(0).log_softmax(-1), rows(1)
    values, ids = target.topk(top)
    few = loss(name, drafter, TargetRows(values, ids), torch.zeros(3, 4).long())
    whole = loss(name, drafter, TargetRows(target), torch.zeros(3, 4).long())
    assert bool((few <= whole + 1e-3).all())
    if top == 8:  # the rest is one token
        assert torch.allclose(few, whole, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top", [0, 4])
def test_its_gradient_leads_to_the_target(name: str, top: int) -> None:
    target = rows(0).log_softmax(-1)
    told = TargetRows(*target.topk(top)) if top else TargetRows(target)
    drafter = rows(1).requires_grad_()
    optimiser = torch.optim.Adam([drafter], lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        loss(name, drafter, told, torch.zeros(3, 4).long()).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    left = tvd(*told.beside(drafter.detach()))
    assert float(left.max()) < 0.05


def test_a_row_that_is_certain_has_no_nan() -> None:
    sure = torch.full((1, 1, 5), -torch.inf)
    sure[..., 2] = 0.0
    for told in (
        TargetRows(sure.clamp(min=-80)),
        TargetRows(torch.zeros(1, 1, 1), torch.full((1, 1, 1), 2)),
    ):
        for name in NAMES:
            drafter = torch.zeros(1, 1, 5, requires_grad=True)
            loss(name, drafter, told, torch.zeros(1, 1).long()).sum().backward()  # type: ignore[no-untyped-call]
            assert drafter.grad is not None
            assert bool(drafter.grad.isfinite().all()), name


def test_ids_that_only_one_model_has_count_for_nothing() -> None:
    target, drafter = rows(0), rows(1)[..., :7]
    told = TargetRows(target.log_softmax(-1))
    same = TargetRows(target[..., :7].log_softmax(-1))
    following = torch.zeros(3, 4).long()
    assert torch.allclose(
        loss("tvd", drafter, told, following), loss("tvd", drafter, same, following)
    )


def test_an_id_that_the_drafter_does_not_know_is_one_of_the_others() -> None:
    log_probs = torch.tensor([[[0.5, 0.3, 0.1]]]).log()
    told = TargetRows(log_probs, torch.tensor([[[1, 9, 2]]]))
    drafter = torch.tensor([[[0.1, 0.5, 0.1, 0.3]]]).log()
    found = loss("tvd", drafter, told, torch.zeros(1, 1).long())
    assert float(found) == pytest.approx(0.0, abs=1e-5)


def test_cross_entropy_is_of_the_tokens() -> None:
    drafter = rows(1)
    following = torch.arange(12).reshape(3, 4) % 9
    found = loss("cross-entropy", drafter, None, following)
    assert torch.allclose(found, -drafter.log_softmax(-1).gather(-1, following[..., None])[..., 0])


def test_a_deeper_token_of_a_head_counts_less() -> None:
    found = discounted([torch.tensor(each) for each in (1.0, 10.0, 100.0)])
    torch.testing.assert_close(found, torch.tensor(1 + 0.8 * 10 + 0.64 * 100))
