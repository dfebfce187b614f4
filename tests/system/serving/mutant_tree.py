"""A target that judges siblings as if there were no others."""

from __future__ import annotations

from target_svc import rules
from target_svc.__main__ import main
from tests.support.laws.trees.mutants import SPLIT

rules.BUILT_IN["token"] = SPLIT
main()
