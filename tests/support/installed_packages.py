"""Packages of others, as an installer leaves them in a folder: a module and its entry points."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.repository import ROOT

_PAGE = ROOT / "docs" / "extending.md"

Entries = Mapping[str, Mapping[str, str]]


def install(folder: Path, module: str, text: str, entries: Entries) -> None:
    """Put a package into a folder.

    Args:
        folder: of packages.
        module: its only one; the package has its name.
        text: of the module.
        entries: of each group of entry points the values, by their names.
    """
    folder.joinpath(f"{module}.py").write_text(text)
    about = folder / f"{module}-0.1.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    about.joinpath("entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
            for group, named in entries.items()
        )
    )


def install_examples(folder: Path) -> None:
    """Put the method `repeat` and the rule `lossy_lenient` of docs/extending.md into a folder."""
    blocks = re.findall(r"^```(python|toml)\n(.*?)^```$", _PAGE.read_text(), re.M | re.S)
    texts = [text for kind, text in blocks if kind == "python"]
    projects = [tomllib.loads(text)["project"] for kind, text in blocks if kind == "toml"]
    for module, text, project in zip(
        ("tandem_repeat", "tandem_lenient"), texts, projects, strict=True
    ):
        install(folder, module, text, project["entry-points"])


@contextmanager
def on_path(folder: Path, *modules: str) -> Iterator[None]:
    """Have a folder's packages be installed; at the end, their modules are forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            yield
        finally:
            for module in modules:
                sys.modules.pop(module, None)
