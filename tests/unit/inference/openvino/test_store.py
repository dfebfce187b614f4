"""What is stored of a converted model, and a start that finds the stored files broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.architectures import LLAMA, build
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


def graphs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/graph.xml"))


def test_a_kept_graph_serves_other_weights(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(build(LLAMA))[1] == []
    assert len(graphs(empty_cache)) == 1
    # Traced again it would fail, and be a warning.
    monkeypatch.setattr(openvino_trace, "trace", None)
    model, texts = build(LLAMA), random_texts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = plain_logits(model, texts)
    decoder, warnings = load(model)
    assert (decoder.engine, warnings) == ("openvino", [])
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


def test_another_configuration_or_version_is_another_graph(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(build(LLAMA))
    load(build(LLAMA, rms_norm_eps=1e-3))
    monkeypatch.setattr(disk_cache, "version", lambda _: "another")
    load(build(LLAMA))
    assert len(graphs(empty_cache)) == 3


@pytest.mark.parametrize("name", ["graph.xml", "graph.bin", "sha256"])
@pytest.mark.parametrize("content", [None, b"", b"no graph"])
def test_a_broken_graph_is_one_warning_and_made_anew(
    empty_cache: Path, name: str, content: bytes | None
) -> None:
    load(build(LLAMA))
    file = graphs(empty_cache)[0].with_name(name)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    decoder, warnings = load(build(LLAMA))
    assert (decoder.engine, len(warnings)) == ("openvino", 1)
    assert load(build(LLAMA))[1] == []


def test_a_home_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    decoder, warnings = load(build(LLAMA))
    assert (decoder.engine, len(warnings)) == ("openvino", 1)
