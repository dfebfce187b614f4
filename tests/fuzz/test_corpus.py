"""Messages that fuzzing found, and one for each kind of answer: outcomes have not changed."""

from __future__ import annotations

import pytest

from tests.fuzz.kept import FOUND, kept_of, surfaces
from tests.fuzz.read.surfaces import SURFACES

# Surfaces each of whose seeds is fit for all that it is given to.
ALL_VALID = ("verify", "drafting", "drafted", "verdict", "ran")


def test_every_file_belongs_to_a_surface() -> None:
    assert surfaces() == set(SURFACES)


@pytest.mark.parametrize("name", SURFACES)
async def test_what_is_known_comes_out_as_it_did(name: str) -> None:
    surface = SURFACES[name]()
    await surface.start()
    try:
        for seed in surface.seeds if name in ALL_VALID else ():
            assert await surface.check(seed.SerializeToString()) == "OK"
        for expected, message in kept_of(name):
            status = await surface.check(message)
            assert expected in (FOUND, status.replace(" ", "_")), message
    finally:
        await surface.stop()
