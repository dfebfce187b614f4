"""Which of the replicas that serve belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.peers.clients import DrafterClient, TargetClient
from orchestrator.replicas.compatibility import (
    Law,
    law_of,
    noting,
    require_fit,
    require_law,
    require_protocol,
    require_trees,
)
from orchestrator.replicas.replica import Replica
from tandem.errors import TandemError

R = TypeVar("R", bound=Replica[Any])


@dataclass(frozen=True)
class Agreement:
    """What came of comparing them.

    Attributes:
        law: of the targets that texts go to; None where none can be asked.
        targets: of that law.
        drafters: that fit those targets.
        misfits: why each of the others gets no text.
    """

    law: Law | None
    targets: list[Replica[TargetClient]] = field(default_factory=list)
    drafters: list[Replica[DrafterClient]] = field(default_factory=list)
    misfits: dict[Replica[Any], TandemError] = field(default_factory=dict)


def agree(
    targets: Sequence[Replica[TargetClient]],
    drafters: Sequence[Replica[DrafterClient]],
    law: Law | None,
) -> Agreement:
    """Compare replicas that serve.

    Args:
        targets: that serve.
        drafters: that serve.
        law: that targets have to have; None takes the one that most of them have, of equally many
            the one that comes first.
    """
    misfits: dict[Replica[Any], TandemError] = {}
    speaking = _sift(targets, misfits, lambda reply: require_protocol(reply.info, "a target"))
    if law is None and speaking:
        laws = [law_of(replica.reply) for replica in speaking]
        law = max(laws, key=laws.count)
    if law is None:
        return Agreement(None, misfits=misfits)
    present = law
    same = _sift(speaking, misfits, lambda reply: require_law(present, reply))
    if not same:
        return Agreement(law, misfits=misfits)
    info = same[0].reply.info

    def require_pair(reply: Any) -> None:
        require_fit(info, reply.info, "a drafter")
        require_trees(info, reply)

    fitting = _sift(drafters, misfits, require_pair)
    return Agreement(law, same, fitting, misfits)


def _sift(
    replicas: Sequence[R], misfits: dict[Replica[Any], TandemError], check: Callable[[Any], None]
) -> list[R]:
    """Those whose replies pass a check; why the others do not goes to the misfits."""
    passed = []
    for replica in replicas:
        try:
            with noting(replica.client.address):
                check(replica.reply)
        except TandemError as error:
            misfits[replica] = error
        else:
            passed.append(replica)
    return passed
