"""Messages that fuzzing found, and one for each kind of answer: outcomes have not changed."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.read.surfaces import SURFACES

# Surfaces each of whose seeds is fit for all that it is given to.
ALL_VALID = ("verify", "drafting", "drafted", "verdict", "ran")
FILES = sorted(path.name for path in CORPUS.iterdir())


def files_of(surface: str) -> list[tuple[str, str]]:
    """Those of a surface, with the status that they get; FOUND may get any that is allowed."""
    parts = [(name, name.split("-")) for name in FILES]
    return [(name, status) for name, (of, status, _) in parts if of == surface]


def test_every_file_belongs_to_a_surface() -> None:
    assert {name.split("-")[0] for name in FILES} == set(SURFACES)


@pytest.mark.parametrize("name", SURFACES)
async def test_what_is_known_comes_out_as_it_did(name: str) -> None:
    surface = SURFACES[name]()
    await surface.start()
    try:
        for seed in surface.seeds if name in ALL_VALID else ():
            assert await surface.check(seed.SerializeToString()) == "OK"
        for file, expected in files_of(name):
            status = await surface.check((CORPUS / file).read_bytes())
            assert expected in ("FOUND", status.replace(" ", "_")), file
    finally:
        await surface.stop()
