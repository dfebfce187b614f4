"""Fixtures that tests of models share."""

from __future__ import annotations

import pytest


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO compiles a model once, not again for single tokens: the graph is the same."""
    pytest.importorskip("openvino")
    from tandem.inference.openvino import paged_pass

    monkeypatch.setattr(paged_pass, "_SHARE", 0)
