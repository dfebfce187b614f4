"""Recipes that need no file, by their names; their keys are settings."""

from __future__ import annotations

from pathlib import Path

from drafter_svc.recipe import (
    AnyRecipe,
    ChainsRecipe,
    ForestRecipe,
    LookupRecipe,
    ModelRecipe,
    TreeRecipe,
    read_recipe,
)
from drafter_svc.settings import DrafterSettings


def recipe_of(settings: DrafterSettings) -> AnyRecipe:
    """What a service drafts by.

    Raises:
        StartupError: what is wrong with its file, and where.
    """
    name = settings.recipe or settings.method
    built_in = built_ins(settings)
    return built_in[name] if name in built_in else read_recipe(Path(name))


def built_ins(settings: DrafterSettings) -> dict[str, AnyRecipe]:
    """Every method by itself; of the composing ones, a composition of what the settings name."""
    nodes = settings.max_nodes
    tree = TreeRecipe(acceptance=settings.acceptance, max_nodes=nodes)
    second = ModelRecipe(model=settings.second_model)
    return {
        "model": ModelRecipe(),
        "tree": tree,
        "chains": ChainsRecipe(chains=settings.chains, max_nodes=nodes),
        "lookup": LookupRecipe(ngram=settings.lookup_ngram, window=settings.lookup_window),
        "forest": ForestRecipe(parts=(tree, second), max_nodes=nodes),
    }
