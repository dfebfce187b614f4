"""The stages of a request. Every instant of its wall time belongs to exactly one of them."""

from __future__ import annotations

from typing import NamedTuple

from tandem.telemetry.stages import STEP_STAGES, name_of

ORCHESTRATOR, DRAFTER, TARGET = "orchestrator", "drafter", "target"

# The parts of each step, in the order in which they happen.
STEP_PARTS = {
    step: tuple(name_of(step, stage) for stage in STEP_STAGES)
    for step in ("prefill", "draft", "verify")
}
PART_NAMES = frozenset(f"{step}.{part}" for step, parts in STEP_PARTS.items() for part in parts)
# Spans of the orchestrator: those that are a stage themselves, and those that contain others.
LEAVES = frozenset({"tokenize", "detokenize", "send", "close"})
ROUND = "round"
HOLDERS = frozenset({"open", ROUND})
CALL = "call."
# The attribute of a step's span that the caller wrote, since the service was not asked for it.
INSIDE = "tandem.inside"


class OwnedStage(NamedTuple):
    """A stage, and the service that it belongs to.

    The time of a step outside its parts is `else`. The time of a call outside the service's span
    is `network`. If the service recorded no span, the whole call is `unseen`. The orchestrator's
    time outside all stages is `own`.
    """

    service: str
    name: str

    def __str__(self) -> str:
        return f"{self.service} {self.name}"

    @property
    def in_round(self) -> bool:
        """Whether the stage occurs once per round, and not once per request."""
        return self.name.startswith(("draft.", "verify.", "round.")) or self.name in (
            "detokenize",
            "send",
        )


OWN = OwnedStage(ORCHESTRATOR, "own")


def _step(service: str, step: str) -> tuple[OwnedStage, ...]:
    parts = (*STEP_PARTS[step], "else", "network", "unseen")
    return tuple(OwnedStage(service, f"{step}.{part}") for part in parts)


# In the order in which tables show them.
STAGES: tuple[OwnedStage, ...] = (
    OwnedStage(ORCHESTRATOR, "tokenize"),
    OwnedStage(ORCHESTRATOR, "open.else"),
    *_step(TARGET, "prefill"),
    *_step(DRAFTER, "prefill"),
    *_step(DRAFTER, "draft"),
    *_step(TARGET, "draft"),
    *_step(TARGET, "verify"),
    OwnedStage(ORCHESTRATOR, "detokenize"),
    OwnedStage(ORCHESTRATOR, "send"),
    OwnedStage(ORCHESTRATOR, "round.else"),
    OwnedStage(ORCHESTRATOR, "close"),
    OWN,
)
