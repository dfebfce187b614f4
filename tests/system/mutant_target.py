"""A target whose block rule stops at the first failure: wrong, and plausible."""

from __future__ import annotations

from tandem.verification.verifier import up_to_first_failure
from target_svc.__main__ import main
from target_svc.verifiers import VERIFIERS

type(VERIFIERS["block"]).count_accepted = (  # type: ignore[method-assign]
    lambda self, passed: up_to_first_failure(passed)
)
main()
