"""The drafters that suit vLLM's model, followed as an orchestrator follows its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import TandemError, Unavailable
from tandem.peers.grpc.clients import DrafterClient, dialers_of
from tandem.peers.grpc.deadlines import Deadlines
from tandem.peers.replicas.agreement import sift
from tandem.peers.replicas.compatibility import (
    common_limits,
    longest_text,
    require_fit,
    require_trees,
    wish_from,
)
from tandem.peers.replicas.membership import Replicas
from tandem.peers.replicas.replica import Replica, least_loaded
from tandem.rpc.status import notes_of
from tandem_vllm.settings import PluginSettings

_log = structlog.get_logger(__name__)


class DrafterPool:
    """The drafters that are used.

    Attributes:
        deadlines: of their stages.

    Args:
        settings: name them.
        target: vLLM's model, as a target describes itself.

    Raises:
        StartupError: an address is malformed, or may not be spoken to as the settings say.
    """

    def __init__(self, settings: PluginSettings, target: common_pb2.ModelInfo) -> None:
        self.deadlines = Deadlines(
            settings.open_seconds, settings.draft_seconds, settings.stage_floor_seconds
        )
        self._target = target
        self._zone = settings.zone
        (dialer,) = dialers_of(settings, "drafter")
        self._replicas = Replicas(
            "drafter",
            settings.drafters,
            lambda address, host: DrafterClient(address, dialer, host),
            self._compare,
            settings.connect_seconds,
            settings.resolve_seconds,
        )
        self._fitting: list[Replica[DrafterClient]] = []
        self._limits: common_pb2.ModelInfo | None = None
        self._told: dict[Replica[Any], str] = {}
        self._small: list[str] = []

    async def begin(self) -> None:
        """Follow all. Returns when each has been asked what it serves."""
        await self._replicas.begin()
        self._compare()
        if not self._fitting:
            _log.warning("texts have no drafts yet", reason=str(self._obstacle))

    @property
    def _obstacle(self) -> object:
        return next(iter(self._told.values()), None) or self._replicas.obstacle or "none is known"

    def _compare(self) -> None:
        """Find out again which ones suit."""
        misfits: dict[Replica[Any], TandemError] = {}
        self._fitting = sift(self._replicas.serving, misfits, self._require)
        infos = [replica.reply.info for replica in self._fitting]
        self._limits = common_limits(infos) if infos else self._limits
        if infos:
            self._say_what_is_small(infos)
        for replica, error in misfits.items():
            if self._told.get(replica) != str(error):
                _log.warning("drafter not used", reason=str(error), notes=notes_of(error))
        self._told = {replica: str(error) for replica, error in misfits.items()}

    def _say_what_is_small(self, infos: Sequence[common_pb2.ModelInfo]) -> None:
        """Log what the drafters cannot hold of what vLLM can, where that is news."""
        longest = min(longest_text(info, 0) for info in infos)
        slots = sum(info.max_sequences for info in infos)
        found = []
        if longest < self._target.max_length:
            found.append(
                f"texts have no drafts beyond {longest} tokens, and vLLM's may have"
                f" {self._target.max_length}: raise the drafters' MAX_LENGTH and CACHE_TOKENS"
            )
        if slots < self._target.max_sequences:
            found.append(
                f"{slots} texts at once have drafts, and vLLM computes"
                f" {self._target.max_sequences}: raise the drafters' MAX_SEQUENCES, or add drafters"
            )
        for sentence in found:
            if sentence not in self._small:
                _log.warning(sentence)
        self._small = found

    def _require(self, reply: drafter_pb2.GetModelInfoResponse) -> None:
        require_fit(self._target, reply.info, "a drafter")
        require_trees(self._target, reply)
        wanted = wish_from(reply)
        # One that only learns from it drafts without.
        if wanted is None or (wanted.asks and not reply.learns) or wanted.probes:
            raise Unavailable(
                f"a drafter ({reply.info.model}, {reply.drafter}) reads what its target computes"
                " (hidden states, predictions), which vLLM does not give: draft by METHOD=model"
            )

    @property
    def limits(self) -> common_pb2.ModelInfo | None:
        """That each drafter keeps; None while none is known. Those of drafters that are away hold
        until others come."""
        return self._limits

    def pick(self) -> Replica[DrafterClient] | None:
        """The drafter for a text; None where none suits, has room and has not just failed one."""
        return least_loaded(self._fitting, self._zone)

    async def close(self) -> None:
        """Follow none any more, and close all channels."""
        await self._replicas.close()
