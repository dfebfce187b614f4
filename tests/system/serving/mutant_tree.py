"""A target that judges siblings as if there were no others."""

from __future__ import annotations

from target_svc.__main__ import main
from target_svc.verifiers import VERIFIERS
from tests.support.laws.tree_mutants import SPLIT

VERIFIERS["token"] = SPLIT
main()
