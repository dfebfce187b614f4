"""Whether drafts are prepared, in worlds where it helps or does not. Time is simulated."""

from __future__ import annotations

import pytest

from orchestrator.sizes.ahead import AheadChoice, PreparedSize
from orchestrator.sizes.fixed import FixedSize
from orchestrator.text.contracts import Decided, Drafted
from tandem.telemetry.stages import StageTimes

DRAFTED = Drafted([1, 2], None, None, 0, StageTimes())
KEPT = Decided(2, 2, 3)


class World:
    """Rounds of some texts, in turn.

    Attributes:
        wall_ns: of a round, without prepared drafts and with them.
        prepared: for each round so far, whether its next draft was to be prepared.
    """

    def __init__(self, texts: int, plain_ns: int, prepared_ns: int) -> None:
        self.wall_ns = plain_ns, prepared_ns
        self.prepared: list[bool] = []
        self._now = 0
        everyone = AheadChoice(lambda: texts, lambda: self._now)
        self.policies = [PreparedSize(FixedSize(2), everyone) for _ in range(texts)]

    def run(self, rounds: int) -> float:
        """The share of rounds that prepare."""
        for _ in range(rounds):
            choices = [policy.choose(100) for policy in self.policies]
            self._now += self.wall_ns[choices[0].ahead]
            for policy in self.policies:
                policy.observe(DRAFTED, KEPT)
            self.prepared += [choice.ahead for choice in choices]
        last = self.prepared[-rounds * len(self.policies) :]
        return sum(last) / len(last)


@pytest.mark.parametrize("texts", [1, 16])
def test_the_faster_way_is_found_and_kept(texts: int) -> None:
    slower = World(texts, 100, 130)
    slower.run(200)
    assert slower.run(4_000) < 0.02
    faster = World(texts, 100, 70)
    faster.run(200)
    assert faster.run(4_000) > 0.98


def test_what_makes_no_difference_is_not_done() -> None:
    same = World(1, 100, 99)
    same.run(200)
    assert same.run(4_000) < 0.02


def test_a_world_that_changes_is_noticed() -> None:
    world = World(1, 100, 130)
    world.run(200)
    world.wall_ns = 100, 70
    world.run(3_400)  # it is tried again after 1,600 rounds
    assert world.run(500) > 0.9


def test_rounds_without_a_draft_teach_nothing() -> None:
    world = World(1, 100, 70)
    policy = world.policies[0]
    for _ in range(100):
        assert not policy.choose(1).ahead
        policy.observe(None, Decided(0, 0, 3))
    assert world.run(1) == 0
