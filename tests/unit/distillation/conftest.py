"""A small plan, and few texts of its target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.distillation.plan import Distillation
from tests.support.distilling import small_plan


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Distillation:
    return small_plan(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Few texts of the target, and one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.distillation.training_texts._BLOCK", 16)
        patch.setattr("tandem.distillation.training_texts._AT_ONCE", 8)
        patch.setattr("tandem.distillation.held_out._ROWS", 4)
        patch.setattr("tandem.distillation.held_out._DRAFTS", 2)
        yield
    torch.set_num_threads(threads)
