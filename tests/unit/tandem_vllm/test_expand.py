"""The work-around for vllm#55005."""

from __future__ import annotations

import torch

from tandem_vllm.expand import expand


def test_each_row_has_its_texts_number() -> None:
    x, ends = torch.tensor([0.5, 0.0, 2.0, 0.25]), torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    assert expand(x, ends, 6).tolist() == [0.5, 0.0, 0.0, 0.25, 0.25, 0.25]
    assert expand(x, ends, 6, 0, 1).tolist() == [0.5, 1.0, 1.0, 0.25, 0.25, 0.25]
    top_k = torch.tensor([3, 0, 7, 1], dtype=torch.int32)
    found = expand(top_k, ends, 6)
    assert found.tolist() == [3, 0, 0, 1, 1, 1]
    assert found.dtype == torch.int32
