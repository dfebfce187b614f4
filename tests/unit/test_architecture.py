"""The arrows of ARCHITECTURE.md, checked on the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    allowed = {"numpy", "torch", "tandem", *sys.stdlib_module_names}
    for path, module in imports("tandem/speculation"):
        assert module.split(".")[0] in allowed, (path, module)
        assert not module.startswith("tandem.") or module.startswith("tandem.speculation")


@pytest.mark.parametrize("folder", ["tandem", *SERVICES])
def test_only_the_edge_touches_grpc(folder: str) -> None:
    for path, module in imports(folder):
        if module.split(".")[0] != "grpc" and "_pb2" not in module:
            continue
        edge = {"rpc", "cli", "local", "load"} & set(path.relative_to(ROOT).parts)
        assert edge or path.stem in ("servicer", "messages", "pool"), (path, module)


def rooms_seen_from(room: str) -> set[str]:
    """The rooms and files of `tandem` that a room imports from."""
    found = {m.split(".")[1] for _, m in imports(f"tandem/{room}") if m.startswith("tandem.")}
    return found - {room}


def test_the_command_is_made_of_the_harness_and_not_the_other_way() -> None:
    assert rooms_seen_from("local") <= {"failure", "orchestrator", "settings"}
    assert rooms_seen_from("load") <= {"failure", "orchestrator", "common", "rpc"}
    above = {"cli", "local", "load"}
    rooms = {path.name for path in (ROOT / "tandem").iterdir() if (path / "__init__.py").exists()}
    for room in rooms - above:
        assert not rooms_seen_from(room) & {*above, "failure"}, room


@pytest.mark.parametrize("folder", [*SERVICES, "benchmarks"])
def test_the_command_is_nobodys_library(folder: str) -> None:
    assert not [(p, m) for p, m in imports(folder) if m.startswith("tandem.cli")]


def test_only_the_models_side_touches_torch() -> None:
    for folder in ("tandem", *SERVICES):
        for path, module in imports(folder):
            if module.split(".")[0] in ("torch", "transformers"):
                parts = set(path.relative_to(ROOT).parts)
                side = {"speculation", "inference", "drafters", "verifiers"} & parts
                assert side or path.stem == "engine", (path, module)


@pytest.mark.parametrize(
    "module",
    [
        "orchestrator.__main__",
        "tandem.cli.main",
        "drafter_svc.settings",
        "target_svc.settings",
        *(
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for room in ("local", "load")
            for path in (ROOT / "tandem" / room).glob("*.py")
        ),
    ],
)
def test_runs_without_torch_and_transformers(module: str) -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    command = [sys.executable, "-c", f"{blocked}; import {module}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
