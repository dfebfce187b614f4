"""Fixtures that several files share."""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop, SelectorEventLoop
from collections.abc import Callable, Mapping

import pytest

from tests.support.cluster.manifests import (
    VARIANTS,
    Manifests,
    base,
    render,
    tool,
)
from tests.support.virtual_time import VirtualTimeLoop

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


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Time is virtual, but where threads or sockets do the work."""
    if item.get_closest_marker("real_time"):
        return {"real": SelectorEventLoop}
    return {"virtual": VirtualTimeLoop}
