"""Verification rules by name. A new rule is one file and one entry.

Those in LOSSY_VERIFIERS change the law of the text; their files are in `lossy/`.
"""

from typing import Any

from tandem.verification.block import BlockVerifier
from tandem.verification.gbv import GbvVerifier
from tandem.verification.greedy_block import GreedyBlockVerifier
from tandem.verification.lossy.fallback import FallbackVerifier
from tandem.verification.lossy.topk_gap import TopkGapVerifier
from tandem.verification.lossy.typical import TypicalVerifier
from tandem.verification.spectr import SpecTrVerifier
from tandem.verification.token import TokenVerifier
from tandem.verification.verifier import Verifier

__all__ = ["LOSSY_VERIFIERS", "VERIFIERS", "Verifier"]

VERIFIERS: dict[str, Verifier[Any]] = {
    rule.name: rule
    for rule in (
        TokenVerifier(),
        BlockVerifier(),
        GreedyBlockVerifier(),
        SpecTrVerifier(),
        GbvVerifier(),
    )
}
LOSSY_VERIFIERS: dict[str, Verifier[Any]] = {
    rule.name: rule for rule in (TypicalVerifier(), TopkGapVerifier(), FallbackVerifier())
}
