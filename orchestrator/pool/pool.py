"""Who serves the next text: of the replicas that fit together, the least loaded, or one among these
that was sent the text's beginning before."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import structlog

from orchestrator.pool.capacity import TargetCapacity
from orchestrator.pool.notifier import Notifier
from orchestrator.pool.prefixes import Prefix, SentPrefixes
from orchestrator.settings import OrchestratorSettings
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import TandemError, Unavailable
from tandem.peers.grpc.clients import DrafterClient, TargetClient, dialers_of
from tandem.peers.grpc.deadlines import Deadlines
from tandem.peers.replicas.agreement import Agreement, agree
from tandem.peers.replicas.compatibility import (
    Capabilities,
    Law,
    capabilities_of,
    law_of,
    own_drafters,
)
from tandem.peers.replicas.membership import Replicas
from tandem.peers.replicas.replica import Replica, sound
from tandem.peers.text.tokenizer_files import TokenizerFiles
from tandem.profile import PassTime
from tandem.rpc.status import notes_of

_log = structlog.get_logger(__name__)

# Between two looks for a drafter with room.
_LOOK_SECONDS = 0.25

# When a text left a process on a target, by time.monotonic().
Left = Mapping[tuple[Replica[TargetClient], int], float]


class ReplicaPool:
    """The replicas that this orchestrator uses.

    Texts begin with the law that most of the serving targets have, and end with it: no text moves
    to a target of another law. A target of another law than that of most gets no new text.
    What is offered follows who serves: all is compared again whenever a replica changes.

    Attributes:
        target_deadlines, drafter_deadlines: of their stages.
        sent_to_targets, sent_to_drafters: beginnings of texts.

    Args:
        settings: name the services.
        changed: called when what is offered is another, or is there no more.

    Raises:
        StartupError: an address is malformed, or may not be spoken to as the settings say.
    """

    def __init__(
        self, settings: OrchestratorSettings, changed: Callable[[], None] = lambda: None
    ) -> None:
        seconds, again = settings.connect_seconds, settings.resolve_seconds
        to_drafters, to_targets = dialers_of(settings, "drafter", "target")
        self._targets = Replicas(
            "target",
            settings.targets,
            lambda address, host: TargetClient(address, to_targets, host),
            self._compare,
            seconds,
            again,
        )
        self._draft_by = settings.draft_by
        self._allow_lossy = settings.allow_lossy
        self._drafters = Replicas(
            "drafter",
            () if settings.draft_by == "target" else settings.drafters,
            lambda address, host: DrafterClient(address, to_drafters, host),
            self._compare,
            seconds,
            again,
        )
        self._changed = changed
        self._notifier = Notifier()
        floor = settings.stage_floor_seconds
        self.target_deadlines = Deadlines(settings.open_seconds, settings.verify_seconds, floor)
        self.drafter_deadlines = Deadlines(settings.open_seconds, settings.draft_seconds, floor)
        self.sent_to_targets, self.sent_to_drafters = SentPrefixes(), SentPrefixes()
        self._begun = False
        self._agreed = Agreement(None)
        # What the drafters said that fitted last: it holds for what is offered while all are away.
        self._drafts: list[drafter_pb2.GetModelInfoResponse] = []
        self._told: dict[Replica[Any], str] = {}
        self._capabilities: Capabilities | None = None
        self._obstacle: TandemError = Unavailable("the services have not answered yet")

    async def begin(self) -> None:
        """Follow all replicas. Returns when each has been asked what it serves."""
        await asyncio.gather(self._targets.begin(), self._drafters.begin())
        self._begun = True
        self._compare()

    @property
    def capabilities(self) -> Capabilities:
        """What there is for the next text.

        Raises:
            Unavailable: what is missing or differs.
        """
        if self._capabilities is None:
            raise Unavailable(f"not ready: {self._obstacle}")
        return self._capabilities

    def pass_times(self, capabilities: Capabilities) -> Iterator[Sequence[PassTime]]:
        """What the passes of a text's pair take by now: of the target, and of the drafter.

        Args:
            capabilities: that the text began with; they say it where another pair is offered now.
        """
        offered = self._capabilities
        same = offered is not None and offered.pair == capabilities.pair
        return (offered if offered is not None and same else capabilities).pass_times

    def _compare(self) -> None:
        """Find out again which belong together, and what they offer."""
        if not self._begun:  # the first to answer might be the only one of its law
            return
        self._agreed = agree(self._targets.serving, self._drafters.serving, self._agreed.law)
        self._tell(self._agreed.misfits)
        before = self._capabilities
        try:
            self._capabilities = self._found(self._agreed)
        except TandemError as error:
            if self._capabilities is not None or str(error) != str(self._obstacle):
                _log.warning("not ready", reason=str(error), notes=notes_of(error))
            self._capabilities, self._obstacle = None, error
        if self._capabilities is not before:
            self._changed()
        self._notifier.notify()

    def _tell(self, misfits: dict[Replica[Any], TandemError]) -> None:
        """Log who gets no texts, each once."""
        for replica, error in misfits.items():
            if self._told.get(replica) != str(error):
                _log.warning("replica not used", reason=str(error), notes=notes_of(error))
        self._told = {replica: str(error) for replica, error in misfits.items()}

    def _found(self, agreed: Agreement) -> Capabilities:
        """Raises Unavailable where a text could not be begun."""
        if not agreed.targets:
            raise self._missing(self._targets)
        targets = [replica.reply for replica in agreed.targets]
        own = [] if self._draft_by == "drafters" else own_drafters(targets)
        if self._draft_by == "target" and not own:
            raise Unavailable(
                "DRAFT_BY=target, and not every target drafts: set DRAFTS of each, or DRAFT_BY=auto"
            )
        if agreed.drafters:
            self._drafts = [replica.reply for replica in agreed.drafters]
        elif self._drafters.expected and not self._drafts and not own:
            raise self._missing(self._drafters)
        capabilities = capabilities_of(targets, self._drafts, own, lossy=self._allow_lossy)
        return (
            capabilities
            if self._capabilities is None or capabilities != self._capabilities
            else self._capabilities
        )

    def _missing(self, replicas: Replicas[TargetClient] | Replicas[DrafterClient]) -> TandemError:
        """Why none of a service's replicas can be used."""
        misfits = self._agreed.misfits
        wrong = next((misfits[r] for r in replicas.serving if r in misfits), None)
        return wrong or replicas.obstacle or Unavailable(f"no {replicas.role} is known")

    @property
    def counts(self) -> dict[str, Callable[[], int]]:
        """How many replicas of a service texts may go to, by its name."""
        return {
            self._targets.role: lambda: self.target_count,
            self._drafters.role: lambda: self.drafter_count,
        }

    @property
    def target_count(self) -> int:
        """How many targets texts may go to."""
        return len(self._agreed.targets)

    @property
    def drafter_count(self) -> int:
        """How many drafters texts may go to."""
        return len(self._agreed.drafters)

    def pick_drafter(
        self, law: Law, zone: str, prefix: Prefix | None = None
    ) -> Replica[DrafterClient] | None:
        """The drafter for a text; None where none serves that has room and has not just failed one,
        or for a text of a law that is no longer that of most targets.

        One in another zone than the text's target comes last; of the others one that was sent the
        text's beginning, or the one with the smallest load (see `SentPrefixes.choose`).
        """
        drafters = self._agreed.drafters if law == self._agreed.law else ()
        return self.sent_to_drafters.choose(sound(drafters), prefix, zone)

    async def next_drafter(
        self, law: Law, zone: str, seconds: float, prefix: Prefix | None = None
    ) -> Replica[DrafterClient] | None:
        """The same, as soon as there is one; None where that takes too long."""
        # Others' texts come and go, and one that has failed is asked again, without a word to us.
        return await self._notifier.wait_for(
            lambda: self.pick_drafter(law, zone, prefix), seconds, _LOOK_SECONDS
        )

    def note_room(self) -> None:
        """A drafter may have room that it had not."""
        self._notifier.notify()

    def targets(
        self, capabilities: Capabilities, left: Left = MappingProxyType({})
    ) -> list[Replica[TargetClient]]:
        """The targets that a text may have.

        Args:
            capabilities: that the text began with.
            left: that the text has left. It may come back to one that has been asked again since.
        """
        return [
            replica
            for replica in (*self._agreed.targets, *self._agreed.others)
            if replica.answered_at > left.get((replica, replica.reply.info.incarnation), -math.inf)
            and capabilities.takes(replica.reply)
        ]

    @property
    def room(self) -> TargetCapacity:
        """What the targets can hold for us. Without targets the queue admits everything: the text
        itself waits for a target, with its own deadline."""
        targets = self._agreed.targets
        if not targets:
            return TargetCapacity(sys.maxsize)
        told = [target.reply.info for target in targets]
        tokens = [info.cache_tokens or math.inf for info in told]
        promised = sum(info.cache_tokens * max(info.overcommit, 1) or math.inf for info in told)
        return TargetCapacity(sum(target.slots for target in targets), promised, max(tokens))

    async def next_target(
        self, capabilities: Capabilities, left: Left, seconds: float, prefix: Prefix | None = None
    ) -> Replica[TargetClient] | None:
        """The target for a text, as soon as there is one; None where that takes too long."""
        return await self._notifier.wait_for(
            lambda: self.sent_to_targets.choose(self.targets(capabilities, left), prefix), seconds
        )

    def is_alone(self, target: Replica[TargetClient]) -> bool:
        """Whether no other target could go on with its texts now."""
        others = self._agreed.targets
        if target not in others:
            law = law_of(target.reply)
            others = [other for other in self._agreed.others if law_of(other.reply) == law]
        return all(other is target or other.shunned for other in others)

    async def tokenizer(self, seconds: float) -> TokenizerFiles:
        """The tokenizer of what is offered; empty where it has none.

        Raises:
            TandemError: it cannot be had.
        """
        replica = min(self.targets(self.capabilities), key=Replica.order)
        return await replica.client.tokenizer(seconds)

    async def close(self) -> None:
        """Follow none any more, and close all channels."""
        self._begun = False
        await asyncio.gather(self._targets.close(), self._drafters.close())
