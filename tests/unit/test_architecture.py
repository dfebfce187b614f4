"""The arrows of ARCHITECTURE.md, checked on the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SERVICES = ("drafter_svc", "target_svc", "orchestrator")


def imports(folder: str) -> Iterator[tuple[Path, str]]:
    """Each module or name that a file under `folder` imports, under TYPE_CHECKING too.

    Generated stubs are left out.
    """
    for path in (ROOT / folder).rglob("*.py"):
        if "_pb2" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((path, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("folder", ["tandem", *SERVICES])
def test_no_arrow_points_to_another_service(folder: str) -> None:
    others = set(SERVICES) - {folder}
    assert not [(p, m) for p, m in imports(folder) if m.split(".")[0] in others]


def test_speculation_is_pure() -> None:
    allowed = {"numba", "numpy", "torch", "tandem", *sys.stdlib_module_names}
    for room, seen in (("speculation", ()), ("verification", ("speculation",))):
        for path, module in imports(f"tandem/{room}"):
            assert module.split(".")[0] in allowed, (path, module)
        assert rooms_seen_from(room) <= set(seen)


def test_scheduling_model_and_serving_are_apart() -> None:
    """Below each other: serving, drafting, engine, inference; none sees one above it."""
    assert rooms_seen_from("inference") <= {"speculation", "errors"}
    assert rooms_seen_from("engine") <= {
        "inference",
        "speculation",
        "verification",
        "telemetry",
        "errors",
    }
    assert rooms_seen_from("drafting") <= {"engine", "inference", "speculation"}
    assert rooms_seen_from("rpc") <= {
        *("common", "errors", "settings", "speculation", "telemetry"),
    }
    assert "orchestrator" not in rooms_seen_from("serving")


def test_the_engine_does_not_know_what_a_decoder_is() -> None:
    seen = {module for _, module in imports("tandem/engine") if "tandem.inference" in module}
    assert {module.split(".")[2] for module in seen} == {"feed"}


def test_no_rule_is_known_by_its_name() -> None:
    """Traits travel in the handshake; but what decodes plainly has to be called something."""
    for folder in ("tandem", *SERVICES):
        for path in (ROOT / folder).rglob("*.py"):
            if "_pb2" in path.name or "verification" in path.parts or "cli" in path.parts:
                continue
            assert "greedy_block" not in path.read_text(), path


@pytest.mark.parametrize("folder", ["tandem", *SERVICES])
def test_no_file_is_long(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert "_pb2" in path.name or len(path.read_text().splitlines()) <= 300, path


@pytest.mark.parametrize("folder", ["tandem", *SERVICES])
def test_only_the_edge_touches_grpc(folder: str) -> None:
    edge_files = {"servicer", "messages", "sequence", "calls", "clients", "connection"}
    edge_files |= {"handshake", "offer", "pool", "grpc", "grpc_messages", "compatibility"}
    for path, module in imports(folder):
        if module.split(".")[0] != "grpc" and "_pb2" not in module:
            continue
        edge = {"rpc", "serving", "cli", "local", "load"} & set(path.relative_to(ROOT).parts)
        assert edge or path.stem in edge_files or path.name == "methods.py", (path, module)


def test_a_text_is_made_without_grpc() -> None:
    """From a request to its rounds, whatever the front end speaks; the pool is handed in."""
    for room in ("text", "sizes"):
        for path, module in imports(f"orchestrator/{room}"):
            assert "_pb2" not in module, (path, module)
            assert "grpc" not in module, (path, module)


def rooms_seen_from(room: str) -> set[str]:
    """The rooms and files of `tandem` that a room imports from."""
    found = {m.split(".")[1] for _, m in imports(f"tandem/{room}") if m.startswith("tandem.")}
    return found - {room}


def test_the_command_is_made_of_the_harness_and_not_the_other_way() -> None:
    stubs = {"drafter", "target", "orchestrator"}
    assert rooms_seen_from("local") <= {"errors", "failure", "rpc", "settings", *stubs}
    seen_by_load = {"failure", "orchestrator", "common", "rpc", "telemetry", "watch"}
    assert rooms_seen_from("load") <= seen_by_load
    assert rooms_seen_from("planning") <= {"failure", "load", "traces"}
    assert rooms_seen_from("traces") <= {"failure", "telemetry"}
    above = {"cli", "local", "load", "planning", "traces"}
    rooms = {path.name for path in (ROOT / "tandem").iterdir() if (path / "__init__.py").exists()}
    for room in rooms - above:
        assert not rooms_seen_from(room) & {*above, "failure"}, room


@pytest.mark.parametrize("folder", [*SERVICES, "benchmarks"])
def test_the_command_is_nobodys_library(folder: str) -> None:
    assert not [(p, m) for p, m in imports(folder) if m.startswith("tandem.tools.cli")]


def test_only_the_models_side_touches_torch() -> None:
    for folder in ("tandem", *SERVICES):
        for path, module in imports(folder):
            if module.split(".")[0] in ("torch", "transformers", "numba"):
                side = {"speculation", "inference", "verification", "engine"}
                assert side & set(path.relative_to(ROOT).parts), (path, module)


@pytest.mark.parametrize(
    "module",
    [
        "orchestrator.__main__",
        "tandem.tools.cli.main",
        "drafter_svc.servicer",
        "drafter_svc.methods",
        "target_svc.settings",
        *(
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for room in ("local", "load", "planning", "traces")
            for path in (ROOT / "tandem" / room).rglob("*.py")
        ),
    ],
)
def test_runs_without_torch_and_transformers(module: str) -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    command = [sys.executable, "-c", f"{blocked}; import {module}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
