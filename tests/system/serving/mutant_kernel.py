"""A target whose block kernel corrects with the target's own row: wrong, and plausible."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.verification import VERIFIERS
from tandem.verification.kernels.chains import decide_block
from target_svc.__main__ import main


def decide(p: Any, tokens: Any, sizes: Any, ids: Any, weights: Any, *rest: Any) -> None:
    """Block's number of kept tokens, and after as many what plain decoding would draw."""
    uniforms, row, state, out = rest
    decide_block(p, tokens, sizes, ids, weights, *rest)
    kept, own = int(out[0]), np.zeros(3)
    none = tokens[:0], sizes[:0], ids[:0], weights[:0]
    decide_block(p[kept : kept + 1], *none, uniforms[-1:], row, state, own)
    out[1] = own[1]


rule: Any = type(VERIFIERS["block"])
rule.fused = staticmethod(decide)
main()
