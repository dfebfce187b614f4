"""A target that judges siblings as if there were no others."""

from __future__ import annotations

from target_svc import messages
from target_svc.__main__ import main
from tests.support.laws.trees.mutants import SPLIT

messages._RULES["token"] = SPLIT
main()
