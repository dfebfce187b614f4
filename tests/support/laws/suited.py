"""Which rules take which drafters' drafts, by the traits of both."""

from __future__ import annotations

from typing import Any

from tandem.drafting.drafter import Drafter
from tandem.verification import VERIFIERS, Verifier


def rules_for(drafter: Drafter | type[Drafter]) -> list[Verifier[Any]]:
    """The rules that decide a drafter's drafts, as the orchestrator offers them."""
    shape, pure = drafter.shape, drafter.pure
    return [rule for rule in VERIFIERS.values() if rule.suits(shape, pure=pure)]
