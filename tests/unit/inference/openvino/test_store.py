"""What is stored of a converted model, and a start that finds the stored files broken."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.models.architectures import SMALL, build
from tests.support.models.parity import (
    TOLERANCE,
    differences,
    load,
    plain_logits,
    ragged_logits,
    random_texts,
)

pytest.importorskip("openvino")

from tandem.inference import disk_cache
from tandem.inference.openvino import trace as openvino_trace

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the start of a model left."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        assert load(build(SMALL))[1] == []
    return home


@pytest.fixture
def copied(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, for one test."""
    shutil.copytree(stored, tmp_path / "home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return disk_cache.cache_folder()


def graphs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/graph.xml"))


def test_a_kept_graph_serves_other_weights(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(graphs(copied)) == 1
    # Traced again it would fail, and be a warning.
    monkeypatch.setattr(openvino_trace, "trace", None)
    model, texts = build(SMALL), random_texts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = plain_logits(model, texts)
    decoder, warnings = load(model)
    assert (decoder.engine, warnings) == ("openvino", [])
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


def test_another_configuration_or_version_is_another_graph(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(build(SMALL, rms_norm_eps=1e-3))
    monkeypatch.setattr(disk_cache, "_versions", lambda: {"torch": "another"})
    load(build(SMALL))
    assert len(graphs(copied)) == 3


# What a file holds instead is seen by its hash: only the hash's own file may be read as empty.
@pytest.mark.parametrize(
    ("name", "content"),
    [
        *product(["graph.xml", "graph.bin", "sha256"], [None, b"no graph"]),
        ("sha256", b""),
    ],
)
def test_a_broken_graph_is_one_warning_and_made_anew(
    copied: Path, name: str, content: bytes | None
) -> None:
    file = graphs(copied)[0].with_name(name)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    decoder, warnings = load(build(SMALL))
    assert (decoder.engine, len(warnings)) == ("openvino", 1)
    assert load(build(SMALL))[1] == []


def test_a_home_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    decoder, warnings = load(build(SMALL))
    assert (decoder.engine, len(warnings)) == ("openvino", 1)
