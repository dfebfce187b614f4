"""Checkpoints that many tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest

from tests.support.processes.measuring import measure_once
from tests.support.repository import ROOT

pytest_plugins = ["tests.support.pytest_runs.campaigns", "tests.support.pytest_runs.hangs"]

# gRPC's core tells of every connection that is lost, on standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Of huge pages, each that a tiny model touches is cleared, which took a tenth of the tests' time.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
# Services of tests start by the hundred: they compute by torch, in float32, unless a test is
# about what does.
for _service in ("DRAFTER", "TARGET"):
    os.environ.setdefault(f"TANDEM_{_service}_ENGINE", "torch")
    os.environ.setdefault(f"TANDEM_{_service}_DTYPE", "float32")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: garbage is never looked for in it."""
    gc.disable()
    yield
    gc.freeze()
    # Rarely in what came later too: by default a thirtieth of the tests' time goes into it.
    gc.set_threshold(5_000, 10, 20)
    gc.enable()


# What imports torch is imported within a fixture: xdist's first process, which only deals out the
# tests, would need ten seconds for it before the others start.


@pytest.fixture(autouse=True, scope="session")
def little_computing() -> None:
    import torch

    # Tiny tensors gain nothing from threads, which only get into each other's way.
    torch.set_num_threads(1)
    measure_once()


@pytest.fixture(autouse=True, scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What services keep for their next start is not kept beyond the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def packages_read_once() -> Iterator[None]:
    """The entry points of installed packages are read once for each `sys.path`: it takes 10 ms, and
    every drafter that starts asks for them."""

    @cache
    def once(path: tuple[str, ...], group: str, name: str) -> EntryPoints:
        return entry_points(group=group, name=name)

    def of_this_path(group: str, name: str) -> EntryPoints:
        return once(tuple(sys.path), group, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.entry_points.entry_points", of_this_path)
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept from a start of another test."""
    from tandem.inference.disk_cache import cache_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A drafter and an unrelated target, one layer each, vocabulary 5, no tokenizer."""
    from tests.support.models.tiny import save_random_llama

    folder = tmp_path_factory.mktemp("pair")
    return save_random_llama(folder / "drafter", 2), save_random_llama(folder / "target", 1)


@pytest.fixture(scope="session")
def near_pair(
    random_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The random target, and a drafter near it, most of whose tokens are accepted."""
    from tests.support.models.tiny import noisy

    folder = tmp_path_factory.mktemp("near")
    noisy(random_pair[1], 0.1, 1).save_pretrained(folder)
    return folder, random_pair[1]


@pytest.fixture(scope="session")
def embedded_pair() -> tuple[Path, Path]:
    """The pair that the repository carries."""
    models = ROOT / "models"
    return models / "drafter", models / "target"
