"""The longest draft that drafter and target allow, where the orchestrator is to ask for more."""

from __future__ import annotations

import os

from tandem.failure import Misconfigured
from tandem.settings import LONGEST_DRAFT, ModelSettings

_DEFAULT: int = ModelSettings.model_fields["max_gamma"].default


def allow_drafts(services: dict[str, dict[str, str]]) -> None:
    """Add MAX_GAMMA to the settings of the services with a model, but not over the environment.

    Args:
        services: settings by service, without their prefixes.

    Raises:
        Misconfigured: drafts of the orchestrator's GAMMA cannot be had.
    """
    default = os.environ.get("TANDEM_ORCHESTRATOR_GAMMA", "")
    asked = services["orchestrator"].get("GAMMA", default)
    if not asked.isdecimal():
        return  # nothing was asked for, or what the orchestrator itself refuses
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
