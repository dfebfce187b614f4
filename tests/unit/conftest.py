"""Fixtures that several files share."""

from __future__ import annotations

import os

import pytest

from tests.support.cluster.manifests import (
    VARIANTS,
    Manifests,
    base,
    render,
    tool,
)

needs_kustomize = pytest.mark.skipif(
    tool("kustomize") is None,
    reason="kustomize is not installed; `make kubernetes-check` builds it and renders the overlays",
)


@pytest.fixture(
    params=["base", *(pytest.param(name, marks=needs_kustomize) for name in VARIANTS)],
    scope="module",
)
def manifests(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Manifests:
    if request.param == "base":
        return base()
    return render(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture
def no_otel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
