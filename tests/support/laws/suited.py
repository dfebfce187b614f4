"""Which rules take which drafters' drafts, by the traits of both."""

from __future__ import annotations

from typing import Any

from tandem.drafting.drafter import Drafter
from tandem.drafting.methods import METHODS
from tandem.speculation.nodes import DraftShape
from tandem.verification import VERIFIERS, Verifier


def rules_for(drafter: Drafter | type[Drafter]) -> list[Verifier[Any]]:
    """The rules that decide a drafter's drafts, as the orchestrator offers them."""
    shape, pure = drafter.shape, drafter.pure
    return [rule for rule in VERIFIERS.values() if rule.suits(shape, pure=pure)]


def tried_rules(name: str) -> list[Verifier[Any]]:
    """The rules to try a method with where each takes long: all that suit it; of methods that draft
    chains, all with `model` and the common ones with the others, whose chains are no different to
    a rule."""
    rules = rules_for(METHODS[name].drafter)
    if METHODS[name].drafter.shape is not DraftShape.CHAIN or name == "model":
        return rules
    return [rule for rule in rules if rule.name in ("token", "block")]
