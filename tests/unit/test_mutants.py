"""The list of `make mutants` fits the product."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS
from tests.support.mutants.serving import Mutant
from tests.support.repository import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_one_place_and_tests(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert mutant.tests
    assert all((ROOT / name).is_file() for name in mutant.tests)
