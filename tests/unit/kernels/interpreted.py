"""Cases of all kernels in Triton's interpreter, and what mutants' cases find.

The interpreter replaces the compiler if `TRITON_INTERPRET` is set before Triton is imported: so
`test_interpreted.py` runs this file once, in a process of its own, and reads what it prints.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import torch

from tests.unit.kernels import layers, numbers
from tests.unit.kernels.interpreter import mutated, spare_the_interpreter, tried

CASES = {**layers.CASES, **numbers.CASES}
MUTANTS = {**layers.MUTANTS, **numbers.MUTANTS}
# The last one of each case.
HERE = list({mutant.case: name for name, mutant in MUTANTS.items()}.values())


def main() -> None:
    """Print a JSON of the faults of all `cases`, or of those that cases find in `some` mutants, or
    in all `mutants`."""
    torch.set_num_threads(1)
    spare_the_interpreter()
    # What is not written is NaN, and not by chance what an earlier call left there. The public
    # `use_deterministic_algorithms` would import a compiler first, for 3 s.
    torch._C._set_deterministic_algorithms(True)
    found: dict[str, Any] = {}
    if sys.argv[1] == "cases":
        found = {name: tried(case.faults) for name, case in CASES.items()}
    else:
        for name in HERE if sys.argv[1] == "some" else MUTANTS:
            mutant = MUTANTS[name]
            with mutated(mutant):
                found[name] = tried(lambda own=CASES[mutant.case]: [*islice(own.faults(), 1)])  # type: ignore[misc]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
