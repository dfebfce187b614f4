"""The rules that a target offers: Tandem's own, and those of other packages that its settings
name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from tandem.entry_points import imported, refused, registered
from tandem.errors import StartupError
from tandem.speculation.tree import DraftShape
from tandem.verification import LOSSY_VERIFIERS, VERIFIERS
from tandem.verification.verifier import RuleOption, Verifier

GROUP = "tandem.verifiers"

Rules = Mapping[str, Verifier[Any]]

BUILT_IN: dict[str, Verifier[Any]] = VERIFIERS | LOSSY_VERIFIERS

# What a rule with a state defines, so that a text can move to another target.
_STATE = ("carry_from", "pack", "unpack", "levels_of")
_LOSSY = "lossy_"


def rules_with(names: Sequence[str]) -> Rules:
    """Tandem's rules and those of other packages, by name. Imports the packages.

    Args:
        names: of the other packages' rules.

    Raises:
        StartupError: a name is taken or unknown, or its rule cannot be imported or is not as
            `Verifier` says; one sentence names what is missing.
    """
    rules = dict(BUILT_IN)
    for name in names:
        entry = registered(GROUP, name)
        if name in BUILT_IN:
            raise StartupError(
                f"TANDEM_TARGET_VERIFIERS: {name!r} is a built-in rule, which is always offered;"
                " leave it out, or rename the rule of the installed package"
            )
        if entry is None:
            raise StartupError(
                f"TANDEM_TARGET_VERIFIERS: no installed package registers {name!r} ({GROUP})"
            )
        rule = imported(entry)
        if fault := fault_of(rule, name):
            raise refused(entry, fault)
        rules[name] = rule
    return rules


def fault_of(rule: object, name: str) -> str:
    """What a rule lacks, as the end of a sentence; empty if nothing.

    Args:
        rule: what an entry point names.
        name: of the entry point.
    """
    if isinstance(rule, type) and issubclass(rule, Verifier):
        return f"is a class: register an object, such as {name} = {rule.__name__}()"
    if not isinstance(rule, Verifier):
        return "is no tandem.verification.verifier.Verifier"
    if getattr(rule, "name", None) != name:
        return f"lacks its name: name = {name!r}"
    if not isinstance(getattr(rule, "lossless", None), bool):
        return "lacks lossless: True if texts follow the target's law exactly, else False"
    if rule.lossless == name.startswith(_LOSSY):
        return f"has lossless = {rule.lossless}: a lossy rule's name, and no other, begins {_LOSSY}"
    return _fault_of_drafts(rule) or _fault_of_state(rule) or _fault_of_options(rule)


def _fault_of_drafts(rule: Verifier[Any]) -> str:
    """Between the drafts that a rule takes and its forms for them."""
    kind = type(rule)
    if not isinstance(rule.takes, DraftShape):
        return "has takes, which must be a DraftShape"
    judges_itself = kind.judged is not Verifier.judged or kind.verify is not Verifier.verify
    if rule.takes is not DraftShape.CHAIN and rule.trees is None and not judges_itself:
        return f"takes {rule.takes.name}, and lacks trees: a TreeRule"
    if rule.takes is DraftShape.CHAIN and rule.trees is not None:
        return "has trees, and takes CHAIN: set takes, or trees = None"
    return ""


def _fault_of_state(rule: Verifier[Any]) -> str:
    """A state that is carried from round to round needs every draft, and the other way round."""
    if not isinstance(rule.needs_every_draft, bool):
        return "has needs_every_draft, which must be True or False"
    missing = [name for name in _STATE if getattr(type(rule), name) is getattr(Verifier, name)]
    if rule.needs_every_draft and missing:
        return f"has needs_every_draft, and lacks {', '.join(missing)}: how its state is kept"
    carries = type(rule)._carry is not Verifier._carry
    if not rule.needs_every_draft and (carries or len(missing) < len(_STATE)):
        return "keeps a state, and lacks needs_every_draft = True"
    return ""


def _fault_of_options(rule: Verifier[Any]) -> str:
    """Of the numbers that a request may set."""
    options: object = rule.options
    if not (isinstance(options, tuple) and all(isinstance(each, RuleOption) for each in options)):
        return "has options, which must be a tuple of RuleOption"
    for option in rule.options:
        bounds = option.least, option.default, option.most
        if not all(isinstance(bound, int | float) and isfinite(bound) for bound in bounds):
            return f"has the option {option.name}, whose bounds and default must be finite numbers"
        if not option.least <= option.default <= option.most:
            return f"has the option {option.name}, whose default must be within its bounds"
        if getattr(rule, option.name, None) != option.default:
            return f"has the option {option.name}, and lacks a field with its default"
    try:
        same = rule.with_options({option.name: option.default for option in rule.options})
        # Texts whose rules are equal are decided together.
        alike = same == rule and hash(same) == hash(rule)
    except (TypeError, ValueError):
        alike = False
    return "" if alike else "must be hashable; with options, a dataclass(frozen=True)"
