"""Replicas of the two services: the handshake, and who serves the next text."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from orchestrator.clients import DrafterClient, TargetClient
from orchestrator.handshake import (
    least_limits,
    longest_draft,
    noting,
    require_fit,
    require_protocol,
    require_same_law,
    rules_of,
)
from orchestrator.request import Rule
from tandem.common.v1 import common_pb2
from tandem.errors import TandemError, Unavailable
from tandem.rpc.status import notes_of

_log = structlog.get_logger(__name__)
_RETRY_SECONDS = 0.2
# About what a channel needs to reach a replica that is back.
_SHUNNED_SECONDS = 5.0

C = TypeVar("C", DrafterClient, TargetClient)


@dataclass(eq=False)
class Replica(Generic[C]):
    """One address and its load.

    Attributes:
        client: its channel.
        active: texts that it serves for us.
        failed_at: when it last failed, by time.monotonic().
    """

    client: C
    active: int = field(default=0)
    failed_at: float = field(default=-math.inf)

    @property
    def load(self) -> tuple[bool, int]:
        """To pick the least of. One that is gone has no texts, and must not attract them all."""
        return time.monotonic() - self.failed_at < _SHUNNED_SECONDS, self.active

    @contextmanager
    def lease(self) -> Iterator[C]:
        """Count a text while it is served."""
        self.active += 1
        try:
            yield self.client
        except Unavailable:
            self.note_failure()
            raise
        finally:
            self.active -= 1

    def note_failure(self) -> None:
        """Prefer others for a while."""
        self.failed_at = time.monotonic()


class Pool:
    """The replicas that this orchestrator uses.

    Attributes:
        target: what the targets serve, with the least limits of them all.
        drafter: the same of the drafters; None without drafters.
        max_gamma: longest draft that every replica can make and take; 0 without drafters.
        rules: that the targets know and the drafters suit, by name.
        tokenizer_json: the target's; empty where it has none.

    Args:
        drafters: addresses; none decodes plainly.
        targets: addresses.
        connect_seconds: how long a replica may take to answer.
    """

    def __init__(
        self, drafters: Sequence[str], targets: Sequence[str], connect_seconds: float
    ) -> None:
        self._drafters = [Replica(DrafterClient(address)) for address in drafters]
        self._targets = [Replica(TargetClient(address)) for address in targets]
        self._connect_seconds = connect_seconds
        self._obstacle = "the services have not answered yet"
        self._ready = False
        self.target = common_pb2.ModelInfo()
        self.drafter: common_pb2.ModelInfo | None = None
        self.max_gamma = 0
        self.rules: Mapping[str, Rule] = {}
        self.tokenizer_json = b""

    async def become_ready(self) -> None:
        """Ask every replica what it serves, until all have answered and all fit together.

        A pair that does not fit is asked again: it may be replaced while we wait. Until then
        `require_ready` says what differs.
        """
        while not self._ready:
            try:
                await self._shake_hands()
                self._ready = True
            except TandemError as error:
                if str(error) != self._obstacle:
                    self._obstacle = str(error)
                    _log.warning("not ready", reason=self._obstacle, notes=notes_of(error))
                await asyncio.sleep(_RETRY_SECONDS)

    def require_ready(self) -> None:
        """Refuse requests until the pair is known to fit.

        Raises:
            Unavailable: what is missing or differs.
        """
        if not self._ready:
            raise Unavailable(f"not ready: {self._obstacle}")

    async def _shake_hands(self) -> None:
        seconds = self._connect_seconds
        targets = [await replica.client.model_info(seconds) for replica in self._targets]
        drafters = [await replica.client.model_info(seconds) for replica in self._drafters]
        first = targets[0]
        for place, (reply, replica) in enumerate(zip(targets, self._targets, strict=True), 1):
            with noting(replica.client.address):
                require_protocol(first.info, "target 1")
                require_fit(first.info, reply.info, f"target {place}")
                require_same_law(first, reply, f"target {place}")
        for place, (answer, drafting) in enumerate(zip(drafters, self._drafters, strict=True), 1):
            with noting(drafting.client.address):
                require_fit(first.info, answer.info, f"drafter {place}")
        self.target = least_limits([reply.info for reply in targets])
        self.drafter = least_limits([reply.info for reply in drafters]) if drafters else None
        self.max_gamma = longest_draft(self.target, drafters)
        self.rules = rules_of(first, drafters)
        self.tokenizer_json = await self._targets[0].client.tokenizer_json(seconds)

    def pick_drafter(self) -> Replica[DrafterClient] | None:
        """The drafter with the fewest texts, of those that did not just fail; None without any."""
        return min(self._drafters, key=lambda replica: replica.load, default=None)

    def pick_target(self) -> Replica[TargetClient]:
        """The target with the fewest texts, of those that did not just fail."""
        return min(self._targets, key=lambda replica: replica.load)

    def targets_beside(self, used: Sequence[Replica[TargetClient]]) -> list[Replica[TargetClient]]:
        """The others, the one to pick first."""
        others = [replica for replica in self._targets if replica not in used]
        return sorted(others, key=lambda replica: replica.load)

    async def close(self) -> None:
        """Close all channels."""
        clients = [r.client for r in self._drafters] + [r.client for r in self._targets]
        await asyncio.gather(*(client.close() for client in clients))
