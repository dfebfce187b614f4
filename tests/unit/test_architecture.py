"""The packages (rooms) of ARCHITECTURE.md, checked on the imports: which room may import which, and
how large a room and a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SERVICES = ("drafter_svc", "target_svc", "orchestrator")
PRODUCT = ("tandem", *SERVICES, "tandem_vllm")
TREE = (*PRODUCT, "benchmarks", "models", "tests")
# Of a folder, besides its __init__, and of a file.
MOST_MODULES, MOST_LINES = 12, 500
# The rooms of a folder from the bottom up: each may see those before it, and no other one.
ROOMS = {
    "orchestrator": ("text", "sizes", "pool", "front"),
    "tandem.peers": ("text", "grpc", "replicas"),
    "tandem.inference": ("kv", "check", "batch", "passes", "openvino", "choice", "vllm"),
    "tandem.tools.traces": ("read", "analysis", "prediction", "show"),
    "tandem.tools.planning": ("measured", "simulation"),
    "tandem.tools": ("traces", "watch", "local", "load", "planning", "cli"),
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the tree by its name, but generated stubs."""
    paths = [path for top in TREE for path in (ROOT / top).rglob("*.py")]
    return {name_of(path): path for path in paths if "_pb2" not in path.name}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(module: str) -> tuple[str, ...]:
    """Each module, or name in one, that a module imports, under TYPE_CHECKING too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def imports(room: str) -> Iterator[tuple[str, str]]:
    """What each module of a room imports, those of rooms inside it too."""
    for module in modules():
        if within(module, room):
            yield from ((module, name) for name in imports_of(module))


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def seen_from(room: str, of: str) -> set[str]:
    """The rooms and files of `of` that a room imports from, itself left out."""
    names = {
        name.removeprefix(f"{of}.").split(".")[0] for _, name in imports(room) if within(name, of)
    }
    return names - {room.removeprefix(f"{of}.").split(".")[0], of}


def test_nothing_goes_in_circles() -> None:
    known = modules()
    graph: dict[str, set[str]] = defaultdict(set)
    for module in known:
        for name in imports_of(module):
            used = name if name in known else name.rpartition(".")[0]
            if used in known and used != module:
                graph[module].add(used)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


@pytest.mark.parametrize("folder", ROOMS)
def test_a_room_sees_those_below_it_alone(folder: str) -> None:
    rooms = ROOMS[folder]
    for height, room in enumerate(rooms):
        above = set(rooms[height + 1 :])
        assert not seen_from(f"{folder}.{room}", folder) & above, room


def test_no_room_is_crowded() -> None:
    count = Counter(path.parent for path in modules().values() if path.stem != "__init__")
    assert {str(room): files for room, files in count.items() if files > MOST_MODULES} == {}


def test_no_file_is_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_a_public_class_has_a_name_of_its_own() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        if module.split(".")[0] in PRODUCT:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where[node.name].append(module)
    assert {name: found for name, found in where.items() if len(found) > 1} == {}


@pytest.mark.parametrize("folder", ["tandem", *SERVICES])
def test_no_arrow_points_to_another_service(folder: str) -> None:
    others = {*SERVICES, "tandem_vllm"} - {folder}
    assert not [(m, name) for m, name in imports(folder) if name.split(".")[0] in others]


def test_the_plugin_asks_drafters_as_an_orchestrator_does() -> None:
    """By what both share, and nothing of its own."""
    for service in SERVICES:
        assert not seen_from("tandem_vllm", service)


def test_speculation_is_pure() -> None:
    allowed = {"numba", "numpy", "torch", "tandem", *sys.stdlib_module_names}
    for room, seen in (("speculation", ()), ("verification", ("speculation",))):
        for module, name in imports(f"tandem.{room}"):
            assert name.split(".")[0] in allowed, (module, name)
        assert seen_from(f"tandem.{room}", "tandem") <= set(seen)


def test_scheduling_model_and_serving_are_apart() -> None:
    """Below each other: serving, drafting, engine, inference; none sees one above it. Retrieval is
    below drafting, and who calls drafters and targets sees none of these."""
    below = {
        "vocabulary": set(),
        "retrieval": {"errors", "vocabulary"},
        "kernels": {"speculation", "verification"},
        "inference": {"kernels", "speculation", "errors", "profile", "vocabulary"}
        | {"checkpoint_folder", "lengths"},
        "shaping": {"speculation", "errors"},
        "engine": {"inference", "kernels", "shaping", "speculation", "verification"}
        | {"telemetry", "errors", "profile"},
        "drafting": {"engine", "inference", "retrieval", "shaping", "speculation"}
        | {"entry_points", "errors", "settings"},
        "rpc": {"common", "errors", "settings", "speculation", "telemetry"},
        "distillation": {"client", "errors", "inference", "vocabulary", "whole_files"},
        "online": {"distillation", "inference", "speculation", "errors", "whole_files"},
        "peers": {"rpc", "common", "drafter", "target", "speculation", "telemetry"}
        | {"errors", "profile", "settings"},
    }
    for room, seen in below.items():
        assert seen_from(f"tandem.{room}", "tandem") <= seen, room


def test_the_engine_does_not_know_what_a_decoder_is() -> None:
    assert seen_from("tandem.engine", "tandem.inference") == {"feed", "output"}


def test_no_rule_is_known_by_its_name() -> None:
    """Traits travel in the handshake; but what decodes plainly has to be called something."""
    for module, path in modules().items():
        if module.split(".")[0] in PRODUCT and not {"verification", "cli"} & set(path.parts):
            assert "greedy_block" not in path.read_text(), module


# Where gRPC and its stubs are spoken; of the front, by the files of that front end.
SPEAKS_GRPC = (
    *(
        "tandem.rpc",
        "tandem.serving",
        "tandem.client",
        "tandem.tools.cli",
        "tandem.tools.local",
        "tandem.tools.load",
    ),
    *("drafter_svc", "target_svc"),
    *("tandem.peers.grpc", "tandem.peers.replicas", "orchestrator.pool", "tandem_vllm"),
)


@pytest.mark.parametrize("folder", PRODUCT)
def test_only_the_edge_touches_grpc(folder: str) -> None:
    for module, name in imports(folder):
        if name.split(".")[0] == "grpc" or "_pb2" in name:
            edge = any(within(module, room) for room in SPEAKS_GRPC)
            assert edge or module.startswith("orchestrator.front.grpc."), (module, name)


def test_the_command_is_made_of_the_harness_and_not_the_other_way() -> None:
    stubs = {"drafter", "target", "orchestrator", "common"}
    # `drafting` for its table of methods, which the command's help names.
    seen_by_tools = {"__version__", "drafting", "errors", "failure", "rpc", "settings", "telemetry"}
    seen_by_tools |= {"client", "retrieval", "vocabulary", "checkpoint_folder", "lengths"}
    seen_by_tools |= {"checkpoint_memory", "distillation", *stubs}
    assert seen_from("tandem.tools", "tandem") <= seen_by_tools
    for room in ("traces", "planning"):
        assert not seen_from(f"tandem.tools.{room}", "tandem") & {"rpc", *stubs}, room
    rooms = {path.name for path in (ROOT / "tandem").iterdir() if (path / "__init__.py").exists()}
    assert seen_from("tandem.client", "tandem") <= {"errors", "failure", "rpc", *stubs}
    for room in rooms - {"tools", "client"}:
        assert not seen_from(f"tandem.{room}", "tandem") & {"tools", "failure"}, room


@pytest.mark.parametrize("folder", [*SERVICES, "benchmarks"])
def test_the_command_is_nobodys_library(folder: str) -> None:
    assert not [(m, name) for m, name in imports(folder) if within(name, "tandem.tools.cli")]


def test_only_the_models_side_touches_torch() -> None:
    rooms = ("speculation", "shaping", "kernels", "inference", "verification", "engine")
    side = (*(f"tandem.{room}" for room in (*rooms, "distillation")), "tandem_vllm.rule")
    side += ("tandem_vllm.expand", "tandem.online.home", "tandem.online.learner")
    side += ("tandem.online.__main__", "tandem.online.heads")  # the trainer's process
    for folder in PRODUCT:
        for module, name in imports(folder):
            if name.split(".")[0] in ("torch", "transformers", "numba"):
                assert any(within(module, room) for room in side), (module, name)


def test_runs_without_torch_and_transformers() -> None:
    rooms = (
        "orchestrator",
        "drafter_svc.servicer",
        "drafter_svc.loading",
        "target_svc.settings",
        "tandem.tools",
    )
    command_itself = "tandem.tools.cli.__main__"
    names = [module for room in rooms for module in modules() if within(module, room)]
    names.remove(command_itself)
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    command = [sys.executable, "-c", f"{blocked}; import {', '.join(names)}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
