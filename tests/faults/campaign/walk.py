"""Moments at which a service is killed, stopped or told to end, drawn from a seed."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass
from typing import Literal

from tests.faults.campaign.fleet import ROLES, Fleet, Pod
from tests.faults.campaign.load import Load
from tests.faults.campaign.proxy import Passing, Way

State = Literal["opening", "prefilling", "drafting", "verifying", "replying", "closing"]

STATES: dict[str, tuple[State, ...]] = {
    "drafter": ("opening", "prefilling", "drafting", "replying", "closing"),
    "target": ("opening", "prefilling", "verifying", "replying", "closing"),
}
# What passes on the victim's line when a text reaches a state.
_MESSAGE = {
    "opening": (Way.THERE, "open"),
    "prefilling": (Way.THERE, "open"),
    "drafting": (Way.THERE, "draft"),
    "verifying": (Way.THERE, "verify"),
    "closing": (Way.THERE, "close"),
}
_ANSWER = {"drafter": "drafted", "target": "verdict"}
_SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
# A pause longer than the first one outlasts what a stage is given.
_PAUSES = (0.05, 0.5, 4.0)
_STATE_SECONDS = 20.0


@dataclass(frozen=True)
class Moment:
    """One fault.

    Attributes:
        role: of the victim.
        state: of a text on it.
        number: the signal.
        pause: seconds that a stopped one stands still.
        late: seconds after the message, for states in which the service works.
        pick: chooses among those that live.
    """

    role: str
    state: State
    number: signal.Signals
    pause: float
    late: float
    pick: int

    @classmethod
    def drawn(cls, seed: int, index: int) -> Moment:
        """The index-th of a seed, whatever came before."""
        draw = random.Random(f"{seed}/{index}")
        role = draw.choice(ROLES)
        return cls(
            role,
            draw.choice(STATES[role]),
            draw.choice(_SIGNALS),
            draw.choice(_PAUSES) * draw.uniform(0.5, 1.5),
            draw.uniform(0, 0.006),
            draw.randrange(1 << 30),
        )

    def __str__(self) -> str:
        pause = f" for {self.pause:.2f} s" if self.number is signal.SIGSTOP else ""
        return f"{self.number.name}{pause} of a {self.role}, {self.state}"


class Walk:
    """Does one moment after the other to a fleet under load.

    Args:
        fleet: see there.
        load: that it is under.
    """

    def __init__(self, fleet: Fleet, load: Load) -> None:
        self._fleet = fleet
        self._load = load
        self._away: dict[Pod, asyncio.Task[None]] = {}

    async def step(self, moment: Moment) -> float:
        """Do it; the seconds until the last text under way had a round more."""
        pods = self._fleet.pods[moment.role]
        while len(living := [pod for pod in pods if pod not in self._away]) < 2:
            await asyncio.wait(self._away.values(), return_when=asyncio.FIRST_COMPLETED)
            self._collect()
        victim = living[moment.pick % len(living)]
        await self._reach(victim, moment)
        self._load.note_fault()
        victim.signal(moment.number)
        self._away[victim] = asyncio.create_task(self._bring_back(victim, moment))
        seconds = await self._load.recovery()
        self._collect()
        return seconds

    async def settle(self) -> None:
        """Wait until all are back."""
        if self._away:
            await asyncio.wait(self._away.values())
        self._collect()

    def _collect(self) -> None:
        for pod, task in tuple(self._away.items()):
            if task.done():
                task.result()
                del self._away[pod]

    async def _bring_back(self, pod: Pod, moment: Moment) -> None:
        if moment.number is signal.SIGSTOP:
            await asyncio.sleep(moment.pause)
            pod.signal(signal.SIGCONT)
            return
        code = await pod.ended()
        if moment.number is signal.SIGTERM:
            assert code == 0, f"{pod.role} ended with {code}"
        await asyncio.to_thread(pod.start)
        await pod.ready()

    async def _reach(self, pod: Pod, moment: Moment) -> None:
        """Wait until a text on a pod is in the state; its message has not passed further."""
        assert pod.proxy is not None
        replying = moment.state == "replying"
        way, kind = (Way.BACK, _ANSWER[pod.role]) if replying else _MESSAGE[moment.state]
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        struck = asyncio.Event()

        async def watch(passing: Passing) -> None:
            if passing.way is not way or kind not in passing.kinds or reached.done():
                return
            reached.set_result(None)
            if moment.state in ("opening", "replying"):
                await struck.wait()  # the fault comes before the message

        pod.proxy.interfere = watch
        try:
            async with asyncio.timeout(_STATE_SECONDS):
                await reached
            if moment.state not in ("opening", "replying"):
                await asyncio.sleep(moment.late)
        except TimeoutError:
            pass  # no text came its way; the fault comes all the same
        finally:
            asyncio.get_running_loop().call_soon(struck.set)
