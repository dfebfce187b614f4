"""Mutants that the fake device catches: faults that a reader would miss and a GPU would pay for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from tandem.engine.numbers import decisions, draws
from tandem.inference.batch import tiles
from tandem.inference.batch.tiles import Tiles
from tandem.kernels import attention, verdicts
from tandem.speculation import distribution
from tandem.speculation.request.sampling import Sampling
from tests.unit.inference.passes.fake_device import (
    LLAMA,
    PLAIN,
    Host,
    clock,
    decoder_on_device,
    draft,
    host,
    in_one_call,
    kernel,
    verify,
)

__all__ = ["clock", "host", "in_one_call", "kernel"]  # fixtures of the fake device


def test_a_hidden_wait_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    process = distribution.process

    def asking(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
        probs = process(logits, samplings)
        return probs if probs.sum().item() else logits

    monkeypatch.setattr(decisions, "process", asking)
    with pytest.raises(DataDependentOutputException):
        verify(decoder_on_device(LLAMA), [PLAIN], "greedy_block", [3])


def test_a_hidden_wait_of_kernels_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = verdicts.decide

    def asking(*args: Any) -> Tensor:
        numbers = decide(*args)
        return numbers * numbers[0, 0].item()

    monkeypatch.setattr(verdicts, "decide", asking)
    with pytest.raises(DataDependentOutputException):
        verify(decoder_on_device(LLAMA), [PLAIN], "block", [3])


def test_a_hidden_list_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = draws.draw

    def asking(*args: Any) -> Any:
        drawn = drawing(*args)
        drawn[0][0].draws.tokens.tolist()
        return drawn

    monkeypatch.setattr("tandem.engine.stepper.draw", asking)
    with pytest.raises(DataDependentOutputException):
        draft(decoder_on_device(LLAMA), [PLAIN], 16)


def test_a_tensor_made_on_the_host_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.attend

    def misplacing(query: Tensor, *rest: Any) -> Tensor:
        return attend(query, *rest) * torch.ones(2, query.shape[-1])[0]

    monkeypatch.setattr(attention, "attend", misplacing)
    with pytest.raises(RuntimeError, match="device"):
        draft(decoder_on_device(LLAMA), [PLAIN], 16)


def test_a_number_of_a_tile_that_is_asked_for_is_caught(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing = Tiles.seen

    def asking(self: Tiles, *args: Any) -> Any:
        tiles, rows = seeing(self, *args)
        tiles.max().item()
        return tiles, rows

    monkeypatch.setattr(Tiles, "seen", asking)
    with pytest.raises(DataDependentOutputException):
        draft(decoder_on_device(LLAMA), [PLAIN] * 2, 16)


def test_tiles_left_on_the_host_are_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = tiles.Sent

    def staying(device: torch.device, *arrays: Any) -> Any:
        return sending(torch.device("cpu"), *arrays)

    monkeypatch.setattr(tiles, "Sent", staying)
    with pytest.raises(RuntimeError, match="device"):
        draft(decoder_on_device(LLAMA), [PLAIN] * 2, 16)
