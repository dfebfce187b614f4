"""A published model by vLLM's CPU build, where its environment is (`make vllm-check` makes it)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.exactness import PATIENT
from tests.support.models.greedy import Reference
from tests.support.processes.services import trio
from tests.system.published.test_texts import MAX_LENGTH, differing, texts
from tests.system.vllm.test_target import MISSING

pytestmark = [
    pytest.mark.campaign(
        "texts of a published model by vLLM",
        "unit/inference/vllm: versions, arguments and what is refused",
    ),
    pytest.mark.skipif(find_spec("vllm") is None, reason=MISSING),
    pytest.mark.timeout(1800),
]
VLLM = {"ENGINE": "vllm", "VLLM_EAGER": "true"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_its_rows_are_compared_with_the_models_own_and_served(
    dtype: str, checkpoint: Path, wanted: list[Reference], tmp_path: Path
) -> None:
    few = wanted[::5]
    with trio(
        tmp_path,
        drafter={"METHOD": "lookup", "MODEL": "", **MAX_LENGTH},
        target={"MODEL": str(checkpoint), "DTYPE": dtype, **VLLM, **MAX_LENGTH},
        orchestrator=PATIENT,
    ) as services:
        for gamma in (0, 4):
            found = texts(services, few, gamma)
            assert all(len(text) == len(few[0].tokens) or text[-1] == 2 for text in found)
            if dtype == "float32":
                assert not differing(few, found)
