"""A drafter's recipe for a person."""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape


def shown(recipe: str) -> str:
    """A recipe's method, and those of its keys that are not empty or 0, as markup for a terminal.

    Args:
        recipe: JSON, from a drafter's GetModelInfo.
    """
    try:
        keys = json.loads(recipe)
    except ValueError:
        keys = None
    return escape(_named(keys) if isinstance(keys, dict) else recipe)


def _named(keys: dict[str, Any]) -> str:
    # A draft that ends at its full depth has no threshold.
    left_out = {"method", *(("stop", "threshold") if keys.get("stop") == "fixed" else ())}
    others = [
        f"{key} {_value(value)}"
        for key, value in keys.items()
        if key not in left_out and (value or value is False)
    ]
    method = str(keys.get("method", "unnamed"))
    return f"{method} ({'; '.join(others)})" if others else method


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return _named(value)
    if not isinstance(value, list):
        return str(value)
    parts = [_named(one) if isinstance(one, dict) else str(one) for one in value]
    return (" + " if any(isinstance(one, dict) for one in value) else ", ").join(parts)
