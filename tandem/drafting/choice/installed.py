"""Drafting methods of other packages, found by entry points, and what is checked of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import get_args

from tandem.drafting.drafter import DraftedVocabulary, Drafter, Recipe, Traits, settings_of
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Truncation
from tandem.engine.scorer import Scorer
from tandem.entry_points import imported, refused, registered
from tandem.errors import StartupError, TandemError, first_line
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.tree import MOST_NODES, DraftShape

GROUP = "tandem.drafting_methods"

# Of a drafter: what the engine runs, step by step.
_GENERATORS = ("open", "draft")
_NO_TRAITS = "lacks traits: a value of tandem.drafting.drafter.Traits"
_SETTINGS = {
    setting.name for recipe in METHODS.values() for setting, _ in settings_of(recipe).values()
}


def require_method(name: str) -> str:
    """The name, if a method has it. Imports nothing.

    Raises:
        ValueError: none has.
    """
    if name not in METHODS and registered(GROUP, name) is None:
        raise ValueError(
            f"{name!r} is unknown; use one of {', '.join(map(repr, METHODS))}, or a method that an"
            f" installed package registers ({GROUP})"
        )
    return name


def method_named(name: str) -> type[Recipe] | None:
    """The method of a name, built in or another package's; None if there is none.

    Imports the package, if there is one.

    Raises:
        StartupError: the package's method has the name of a built-in one, cannot be imported, or is
            not as `Recipe` and `Drafter` say; one sentence names what is missing.
    """
    entry = registered(GROUP, name)
    if entry is None:
        return METHODS.get(name)
    if name in METHODS:
        raise refused(entry, "has the name of a built-in method; rename it, or uninstall it")
    recipe = imported(entry)
    if fault := fault_of(recipe, name):
        raise refused(entry, fault)
    method: type[Recipe] = recipe
    return method


def fault_of(recipe: object, name: str) -> str:
    """What a method lacks, as the end of a sentence; empty if nothing.

    Args:
        recipe: what an entry point names.
        name: of the entry point.
    """
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
        return "is no class derived from tandem.drafting.drafter.Recipe"
    if missing := sorted(recipe.__abstractmethods__):
        return f"lacks {', '.join(missing)}"
    key = recipe.model_fields["method"]
    if get_args(key.annotation) != (name,) or key.default != name:
        return f'lacks its name as a key: method: Literal["{name}"] = "{name}"'
    drafts = getattr(recipe, "drafts", None)
    if not (isinstance(drafts, str) and drafts):
        return "lacks drafts: a few words on what it drafts"
    unknown = {mark.name for mark, _ in settings_of(recipe).values()} - _SETTINGS
    if unknown:
        return (
            f"has keys marked as the settings {', '.join(sorted(unknown))}, which the service does"
            " not have: keys of their own are given in a recipe's file"
        )
    return _fault_of_drafter(getattr(recipe, "drafter", None))


def _fault_of_drafter(drafter: object) -> str:
    """What the class of a recipe's drafter lacks; empty if nothing."""
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        return "lacks drafter: a class derived from tandem.drafting.drafter.Drafter"
    who = f"has a drafter, {drafter.__name__},"
    if missing := sorted(drafter.__abstractmethods__):
        return f"{who} that lacks {', '.join(missing)}"
    plain = [
        name for name in _GENERATORS if not inspect.isgeneratorfunction(getattr(drafter, name))
    ]
    if plain:
        return f"{who} whose {', '.join(plain)} must be a generator: begin with `yield from ()`"
    named = _names_in(drafter)
    if "go_on" in named:
        return f"{who} whose go_on is never called: write observe and draft"
    if untold := _untold(named):
        return f"{who} that {untold}"
    traits = drafter.traits
    if not isinstance(traits, Traits):
        return f"{who} that {_NO_TRAITS}"
    if not isinstance(traits.shape, DraftShape) or not isinstance(traits.prepares, bool):
        return f"{who} whose shape is no DraftShape or prepares no bool"
    return ""


def _names_in(drafter: type[Drafter]) -> set[str]:
    """Attributes of a drafter's class, but for those of `Drafter`."""
    return {name for own in drafter.__mro__ if own is not Drafter for name in vars(own)}


def _untold(named: Iterable[str]) -> str:
    """Which traits stand beside a drafter's `traits`, under names of their own, as it was before
    they were one value; as the end of a sentence, empty if none."""
    beside = [each.name for each in fields(Traits) if each.name in named]
    if not beside:
        return ""
    return (
        f"lacks {', '.join(beside)} among its traits: write traits = Traits("
        f"{', '.join(f'{name}=...' for name in beside)})"
    )


def drafter_of(recipe: Recipe, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
    """The drafter that a recipe makes, checked to be as it announces itself.

    Args:
        recipe: of a built-in method, or another package's.
        scorers: one for each of its checkpoints, in their order.
        truncation: of their distributions.

    Raises:
        StartupError: it cannot be made, or its traits contradict each other.
    """
    if recipe.method in METHODS:
        return recipe.make(scorers, truncation)
    try:
        drafter = recipe.make(scorers, truncation)
    except TandemError:
        raise
    except Exception as error:
        raise StartupError(
            f"the recipe {recipe.method} cannot make its drafter: {first_line(error)}"
        ) from error
    if fault := contradiction_of(recipe, drafter):
        raise StartupError(f"the drafter of the recipe {recipe.method} {fault}")
    return drafter


def contradiction_of(recipe: Recipe, drafter: object) -> str:
    """Between the traits of a drafter and its recipe, as the end of a sentence; empty if none.

    Args:
        recipe: that made it.
        drafter: what `make` returned.
    """
    if not isinstance(drafter, recipe.drafter):
        made = type(drafter).__name__
        return f"is of the class {made}, and not of the announced {recipe.drafter.__name__}"
    if untold := _untold({*_names_in(type(drafter)), *vars(drafter)}):
        return untold
    traits = drafter.traits
    if not isinstance(traits, Traits):
        return _NO_TRAITS
    kinds: dict[str, type] = {
        "shape": DraftShape,
        "pure": bool,
        "largest_tree": int,
        "feedback": FeedbackWanted,
        "vocabulary": DraftedVocabulary,
        "data": str,
    }
    for name, kind in kinds.items():
        if not isinstance(getattr(traits, name), kind):
            return f"has a trait {name} that is no {kind.__name__}"
    trees = traits.shape is not DraftShape.CHAIN
    if traits.largest_tree != recipe.largest_tree:
        return (
            f"has largest_tree {traits.largest_tree}, and its recipe {recipe.largest_tree}: they"
            " must be equal"
        )
    if not (0 < traits.largest_tree <= MOST_NODES if trees else traits.largest_tree == 0):
        bound = f"1..{MOST_NODES}" if trees else "0"
        return f"has shape {traits.shape.name}, so largest_tree must be {bound}"
    if traits.looks is not None and not recipe.drafter.traits.prepares:
        return "sets looks, so the traits of its class must have prepares = True"
    if traits.looks is not None and traits.feedback.told:
        return "sets looks and wants feedback: drafts that need feedback are not prepared ahead"
    return ""
