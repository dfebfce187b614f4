"""A target whose block rule stops at the first failure: wrong, and plausible."""

from __future__ import annotations

from typing import Any

from tandem.verification import VERIFIERS
from tandem.verification.chain import up_to_first_failure
from target_svc.__main__ import main

rule: Any = type(VERIFIERS["block"])
rule.count_accepted = lambda self, passed: up_to_first_failure(passed)
rule.fused = None
main()
