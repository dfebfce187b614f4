"""Verification rules by name. A new rule is one file and one entry."""

from typing import Any

from target_svc.verifiers.block import BlockVerifier
from target_svc.verifiers.greedy_block import GreedyBlockVerifier
from target_svc.verifiers.token import TokenVerifier
from target_svc.verifiers.verifier import Verifier

__all__ = ["VERIFIERS", "Verifier"]

VERIFIERS: dict[str, Verifier[Any]] = {
    rule.name: rule for rule in (TokenVerifier(), BlockVerifier(), GreedyBlockVerifier())
}
