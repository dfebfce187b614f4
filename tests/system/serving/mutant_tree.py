"""A target that judges siblings as if there were no others."""

from __future__ import annotations

from tandem.verification import VERIFIERS
from target_svc.__main__ import main
from tests.support.laws.trees.mutants import SPLIT

VERIFIERS["token"] = SPLIT
main()
