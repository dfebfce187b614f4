"""What the replicas that serve offer together: to a text, they are one pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.replicas.compatibility import (
    Law,
    largest_tree,
    law_of,
    least_limits,
    longest_draft,
    rules_of,
)
from orchestrator.text.values import Rule
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.target.v1 import target_pb2

_LIMITS = ("max_length", "max_gamma", "max_nodes", "max_message_bytes")


@dataclass(frozen=True)
class Offer:
    """A text's view of the pool, from its start to its end.

    Attributes:
        target: what the targets serve, with the least limits of them all.
        drafter: the same of the drafters; None without drafters.
        max_gamma: longest draft that every replica can make and take; 0 without drafters.
        max_nodes: most tokens of a tree that they can; 0 where all drafts are chains.
        rules: that the targets know and the drafters suit, by name.
        recipes: of the drafters, each once, as JSON.
        law: that every target of it has.
    """

    target: common_pb2.ModelInfo
    drafter: common_pb2.ModelInfo | None
    max_gamma: int
    max_nodes: int
    rules: Mapping[str, Rule]
    law: Law
    recipes: tuple[str, ...] = ()

    def takes(self, reply: target_pb2.GetModelInfoResponse) -> bool:
        """Whether a target can go on with any text of this offer."""
        kept = (getattr(reply.info, limit) >= getattr(self.target, limit) for limit in _LIMITS)
        return law_of(reply) == self.law and all(kept)


def offer_of(
    targets: Sequence[target_pb2.GetModelInfoResponse],
    drafters: Sequence[drafter_pb2.GetModelInfoResponse],
) -> Offer:
    """What replicas offer that fit together; at least one target.

    Raises:
        Unavailable: no draft of a drafter fits the targets' messages.
    """
    target = least_limits([reply.info for reply in targets])
    return Offer(
        target,
        least_limits([reply.info for reply in drafters]) if drafters else None,
        longest_draft(target, drafters),
        largest_tree(target, drafters),
        rules_of(targets[0], drafters),
        law_of(targets[0]),
        tuple(dict.fromkeys(reply.recipe for reply in drafters if reply.recipe)),
    )
