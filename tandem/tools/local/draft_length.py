"""Raises the longest draft that drafter and target allow to what the orchestrator asks for."""

from __future__ import annotations

import os

from tandem.failure import Misconfigured
from tandem.settings import LONGEST_DRAFT, ModelSettings

_DEFAULT: int = ModelSettings.model_fields["max_gamma"].default


def allow_drafts(services: dict[str, dict[str, str]]) -> None:
    """Add MAX_GAMMA to the settings of drafter and target, unless the environment sets it.

    Args:
        services: settings by service, without their prefixes.

    Raises:
        Misconfigured: the orchestrator's GAMMA is larger than allowed.
    """
    default = os.environ.get("TANDEM_ORCHESTRATOR_GAMMA", "")
    asked = services["orchestrator"].get("GAMMA", default)
    if not asked.isdecimal():
        return  # no fixed length, or one that the orchestrator itself refuses
    gamma = int(asked)
    if gamma > LONGEST_DRAFT:
        raise Misconfigured(f"gamma {gamma} is too long: at most {LONGEST_DRAFT} tokens a draft")
    for name in services.keys() - {"orchestrator"}:
        variable = f"TANDEM_{name.upper()}_MAX_GAMMA"
        allowed = os.environ.get(variable)
        if allowed is None:
            services[name]["MAX_GAMMA"] = str(max(gamma, _DEFAULT))
        elif allowed.isdecimal() and int(allowed) < gamma:
            raise Misconfigured(
                f"gamma {gamma} is more than {variable}={allowed} allows: raise the one or lower"
                " the other"
            )
