"""All replicas of a service: those that were named one by one, and those behind names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog

from tandem.errors import TandemError, Unavailable
from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.replicas.dns import addresses_of, name_of
from tandem.peers.replicas.replica import Replica

_log = structlog.get_logger(__name__)

C = TypeVar("C", DrafterClient, TargetClient)


class Replicas(Generic[C]):
    """The replicas of one service, as they come and go.

    Attributes:
        role: of the service, for sentences.

    Args:
        role: of the service, for sentences.
        targets: gRPC targets; those of `dns:///` are looked up again and again.
        make: a client for an address, and the name that it was found by, if by any.
        changed: called whenever a replica may have changed.
        connect_seconds: that an answer may take.
        resolve_seconds: between two looks at a name.

    Raises:
        StartupError: a target is malformed.
    """

    def __init__(
        self,
        role: str,
        targets: Sequence[str],
        make: Callable[[str, str], C],
        changed: Callable[[], None],
        connect_seconds: float,
        resolve_seconds: float,
    ) -> None:
        self.role = role
        self._make: Callable[[str, str], C] = make
        self._changed = changed
        self._connect_seconds = connect_seconds
        self._resolve_seconds = resolve_seconds
        self._names = {target: name for target in targets if (name := name_of(target))}
        self._places = [target for target in targets if target not in self._names]
        self._replicas: dict[str, Replica[C]] = {}
        # Why a name has no address, by target.
        self._unresolved: dict[str, TandemError] = {}
        self._looking: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def expected(self) -> bool:
        """Whether there are to be any."""
        return bool(self._places or self._names)

    @property
    def known(self) -> list[Replica[C]]:
        """Those that may take texts when they serve."""
        return [replica for replica in self._replicas.values() if not replica.leaving]

    @property
    def serving(self) -> list[Replica[C]]:
        """Those that serve now."""
        return [replica for replica in self.known if replica.serving]

    @property
    def obstacle(self) -> TandemError | None:
        """Why none serves, of one of them; None if it is not known yet."""
        for replica in self.known:
            if replica.obstacle is not None:
                return replica.obstacle
        return next(iter(self._unresolved.values()), None)

    async def begin(self) -> None:
        """Follow all; returns when each has been asked once, whatever came of it."""
        for place in self._places:
            self._add(place)
        first = [asyncio.Event() for _ in self._names]
        self._looking = [
            asyncio.create_task(self._look_up(target, looked))
            for target, looked in zip(self._names, first, strict=True)
        ]
        await asyncio.gather(*(looked.wait() for looked in first))
        await asyncio.gather(*(replica.asked.wait() for replica in self.known))

    def _add(self, address: str, host: str = "") -> None:
        replica = Replica(self._make(address, host), self._changed, self._connect_seconds)
        self._replicas[address] = replica
        replica.follow()

    async def _look_up(self, target: str, looked: asyncio.Event) -> None:
        """Follow a name. Without an answer it stays as it is: its replicas' health says more."""
        before: set[str] = set()
        while True:
            try:
                found = set(await addresses_of(self._names[target]))
            except Unavailable as error:
                if str(error) != str(self._unresolved.get(target)):
                    _log.warning("a name is not resolved", name=target, reason=str(error))
                self._unresolved[target] = error
                self._changed()
            else:
                self._unresolved.pop(target, None)
                self._move(before, found, self._names[target].host)
                before = found
            looked.set()
            await asyncio.sleep(self._resolve_seconds)

    def _move(self, before: set[str], found: set[str], host: str) -> None:
        """Add who came, and let go who went."""
        for address in sorted(found):
            if address not in self._replicas:
                self._add(address, host)
            self._replicas[address].leaving = False
        for address in before - found:
            replica = self._replicas.get(address)
            if replica is not None and not replica.leaving:
                replica.leaving = True
                task = asyncio.create_task(self._let_go(address, replica))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        if before != found:
            self._changed()

    async def _let_go(self, address: str, replica: Replica[C]) -> None:
        """Close a replica after its last text, unless its name has it again by then."""
        await replica.idle.wait()
        if replica.leaving:
            del self._replicas[address]
            await replica.close()

    async def close(self) -> None:
        """Follow none any more."""
        tasks = [*self._looking, *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
