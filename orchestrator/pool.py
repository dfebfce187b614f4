"""Replicas of the two services: the handshake, and who serves the next text."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from tandem.common.v1 import common_pb2
from tandem.errors import TandemError, Unavailable
from tandem.rpc.clients import DrafterClient, TargetClient
from tandem.rpc.messages import PROTOCOL_VERSION
from tandem.rpc.status import notes_of
from tandem.target.v1 import target_pb2

_log = structlog.get_logger(__name__)
_RETRY_SECONDS = 0.2
# About what a channel needs to reach a replica that is back.
_SHUNNED_SECONDS = 5.0

C = TypeVar("C", DrafterClient, TargetClient)


@dataclass
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
        verifiers: that the targets know.
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
        self.verifiers: list[str] = []
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
            with _noting(replica.client.address):
                _require_fit(first.info, reply.info, f"target {place}")
                _require_same_law(first, reply, f"target {place}")
        for place, (answer, drafting) in enumerate(zip(drafters, self._drafters, strict=True), 1):
            with _noting(drafting.client.address):
                _require_fit(first.info, answer.info, f"drafter {place}")
        self.target = _least_limits([reply.info for reply in targets])
        self.drafter = _least_limits([reply.info for reply in drafters]) if drafters else None
        self.verifiers = sorted(first.verifiers)
        self.tokenizer_json = await self._targets[0].client.tokenizer_json(seconds)

    def pick_drafter(self) -> Replica[DrafterClient] | None:
        """The drafter with the fewest texts, of those that did not just fail; None without any."""
        return min(self._drafters, key=lambda replica: replica.load, default=None)

    def pick_target(self) -> Replica[TargetClient]:
        """The target with the fewest texts, of those that did not just fail."""
        return min(self._targets, key=lambda replica: replica.load)

    async def close(self) -> None:
        """Close all channels."""
        clients = [r.client for r in self._drafters] + [r.client for r in self._targets]
        await asyncio.gather(*(client.close() for client in clients))


@contextmanager
def _noting(address: str) -> Iterator[None]:
    """Note the address of what is refused inside the block: for our log, not for clients."""
    try:
        yield
    except Unavailable as error:
        error.add_note(address)
        raise


def _require_fit(target: common_pb2.ModelInfo, other: common_pb2.ModelInfo, who: str) -> None:
    """Refuse a peer whose tokens or protocol are not the target's.

    Raises:
        Unavailable: what differs.
    """
    if other.protocol_version != PROTOCOL_VERSION:
        raise Unavailable(
            f"{who} speaks protocol version {other.protocol_version}, we speak"
            f" {PROTOCOL_VERSION}: deploy the same release of all services"
        )
    if other.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise Unavailable(
            f"{who} ({other.model}) has another tokenizer than the target ({target.model}):"
            f" fingerprints {_short(other)} and {_short(target)}, vocabularies of"
            f" {other.vocab_size} and {target.vocab_size}; a pair must share its tokenizer"
        )
    if not target.tokenizer_fingerprint and other.vocab_size != target.vocab_size:
        raise Unavailable(
            f"{who} has {other.vocab_size} token ids, the target {target.vocab_size},"
            " and neither has a tokenizer that would say which agree"
        )


def _short(info: common_pb2.ModelInfo) -> str:
    return info.tokenizer_fingerprint[:12] or "(none)"


def _require_same_law(
    first: target_pb2.GetModelInfoResponse, other: target_pb2.GetModelInfoResponse, who: str
) -> None:
    """Refuse a target that would end, check or draw texts in another way than the first.

    Raises:
        Unavailable: what differs.
    """
    agreed, its_own = _law(first), _law(other)
    for name, value in its_own.items():
        if value != agreed[name]:
            raise Unavailable(
                f"{who} differs from target 1 in {name}: {value} and {agreed[name]};"
                " all targets must serve the same model in the same way"
            )


def _law(reply: target_pb2.GetModelInfoResponse) -> dict[str, object]:
    info = reply.info
    return {
        "model": info.model,
        "dtype": info.dtype,
        "vocab_size": info.vocab_size,
        "eos_token_ids": sorted(info.eos_token_ids),
        "verifiers": sorted(reply.verifiers),
    }


def _least_limits(replicas: Sequence[common_pb2.ModelInfo]) -> common_pb2.ModelInfo:
    """The first replica, with limits that any of them keeps: a text may go to each."""
    info = common_pb2.ModelInfo()
    info.CopyFrom(replicas[0])
    for name in ("max_length", "max_gamma", "max_sequences"):
        setattr(info, name, min(getattr(replica, name) for replica in replicas))
    return info
