"""Which of the replicas that serve belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.errors import TandemError
from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.replicas.compatibility import (
    Law,
    first_that_asks,
    law_of,
    noting,
    require_feedback,
    require_fit,
    require_law,
    require_protocol,
    require_same_feedback,
    require_trees,
)
from tandem.peers.replicas.replica import Replica

R = TypeVar("R", bound=Replica[Any])


@dataclass(frozen=True)
class Agreement:
    """What came of comparing them.

    Attributes:
        law: of the targets that texts go to; None where none can be asked.
        targets: of that law.
        others: targets of other laws: the texts that began there may end there.
        drafters: that fit the targets of the law.
        misfits: why each of the others gets no text.
    """

    law: Law | None
    targets: list[Replica[TargetClient]] = field(default_factory=list)
    others: list[Replica[TargetClient]] = field(default_factory=list)
    drafters: list[Replica[DrafterClient]] = field(default_factory=list)
    misfits: dict[Replica[Any], TandemError] = field(default_factory=dict)


def agree(
    targets: Sequence[Replica[TargetClient]],
    drafters: Sequence[Replica[DrafterClient]],
    present: Law | None,
) -> Agreement:
    """Compare replicas that serve. Texts begin with the law that most targets have; of equally
    many, with the present one, else with the one that comes first.

    Args:
        targets: that serve.
        drafters: that serve.
        present: law with which texts began so far; None at the start.
    """
    misfits: dict[Replica[Any], TandemError] = {}
    speaking = sift(targets, misfits, lambda reply: require_protocol(reply.info, "a target"))
    if not speaking:
        return Agreement(present, misfits=misfits)
    laws = [law_of(replica.reply) for replica in speaking]
    law = max(laws, key=lambda law: (laws.count(law), law == present))
    same = sift(speaking, misfits, lambda reply: require_law(law, reply))
    others = [replica for replica in speaking if replica in misfits]
    chosen = same[0].reply

    def require_pair(reply: Any) -> None:
        require_fit(chosen.info, reply.info, "a drafter")
        require_trees(chosen.info, reply)
        for each in same:  # a text may go to any of them
            require_feedback(each.reply, reply)

    fitting = sift(drafters, misfits, require_pair)
    first = first_that_asks([replica.reply for replica in fitting])
    fitting = sift(fitting, misfits, lambda reply: require_same_feedback(first, reply))
    return Agreement(law, same, others, fitting, misfits)


def sift(
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
