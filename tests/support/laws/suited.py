"""Which rules take which drafters' drafts, by the traits of both."""

from __future__ import annotations

from typing import Any

from tandem.drafting.drafter import Drafter
from tandem.drafting.methods import METHODS
from tandem.verification import VERIFIERS, Verifier


def rules_for(drafter: Drafter | type[Drafter]) -> list[Verifier[Any]]:
    """The rules that decide a drafter's drafts, as the orchestrator offers them."""
    traits = drafter.traits
    return [rule for rule in VERIFIERS.values() if rule.suits(traits.shape, pure=traits.pure)]


# Of each shape the method that is tried with every rule.
_OF_ITS_SHAPE = ("model", "tree", "chains")


def tried_rules(name: str) -> list[Verifier[Any]]:
    """The rules to try a method with where each takes long: all that suit it, if it stands for its
    shape; else the default one. Each rule with each method is enumerated elsewhere
    (tests/unit/drafting/test_methods.py)."""
    rules = rules_for(METHODS[name].drafter)
    return rules if name in _OF_ITS_SHAPE else [rule for rule in rules if rule.name == "block"]
