"""Real services as processes, under load: a stretch of `make faults`, and restarts one by one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.campaign.fleet import Pod, fleet_of
from tests.faults.campaign.load import Load
from tests.faults.campaign.walk import Moment, Walk
from tests.support.models.tiny import save_random_llama

pytestmark = pytest.mark.campaign(
    "real processes that are killed, stopped, drained and restarted under load fail no text",
    "faults/test_scenarios.py: every fault at every message; "
    "system/serving/test_lifecycle.py: real processes",
)

VOCAB_SIZE = 31
# Each signal to each service, in a state of its own.
MOMENTS = [
    Moment("target", "verifying", signal.SIGKILL, 0.0, 0.001, 0),
    Moment("drafter", "replying", signal.SIGKILL, 0.0, 0.0, 0),
    Moment("target", "opening", signal.SIGSTOP, 0.5, 0.0, 1),
    Moment("drafter", "drafting", signal.SIGSTOP, 0.5, 0.001, 1),
    Moment("target", "prefilling", signal.SIGTERM, 0.0, 0.001, 0),
    Moment("drafter", "closing", signal.SIGTERM, 0.0, 0.0, 0),
]


async def restart(pod: Pod) -> None:
    """As a rolling update does it."""
    pod.signal(signal.SIGTERM)
    assert await pod.ended() == 0
    pod.start()
    await pod.ready()


async def test_no_signal_at_any_state_nor_a_restart_of_all_fails_a_text_or_changes_one(
    tmp_path: Path,
) -> None:
    """Two of each service; texts go on elsewhere, or wait for nobody."""
    models = {
        role: save_random_llama(tmp_path / role, seed, VOCAB_SIZE)
        for role, seed in (("drafter", 2), ("target", 1))
    }
    async with fleet_of(models, tmp_path, fronts=2) as fleet:
        load = Load(fleet.stub)
        await load.learn()
        walk = Walk(fleet, load)
        pods = [*fleet.pods["drafter"], *fleet.pods["target"], *fleet.orchestrators]
        async with load.running():
            for moment in MOMENTS:
                await walk.step(moment)
            await walk.settle()
            before = [pod.pid for pod in pods]
            for pod in pods:
                await load.more(4)
                await restart(pod)
            await load.more(8)
        assert all(pod.pid != pid for pod, pid in zip(pods, before, strict=True))
        outcome = load.outcome
        assert not outcome.failed, outcome.failed[:5]
        assert not outcome.wrong, outcome.wrong[:5]
        # Each client once at each orchestrator's end, at most.
        assert outcome.reset <= load.clients * len(fleet.orchestrators)
        assert await fleet.leaked() == 0
