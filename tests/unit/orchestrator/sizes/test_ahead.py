"""Whether drafts are prepared, in worlds where it helps or does not. Time is simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.sizes.ahead import AheadChoice, PreparedSize
from orchestrator.sizes.fixed import FixedSize
from tandem.peers.text.contracts import AheadWay, DraftReply, VerdictReply
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes

DRAFTED = DraftReply([1, 2], None, None, 0, StageTimes())
KEPT = VerdictReply(2, 2, 3)


class World:
    """Rounds of some texts, in turn.

    Attributes:
        wall_ns: of a round, in each way.
        ways: of each text's rounds so far.
    """

    def __init__(self, texts: int, *wall_ns: int) -> None:
        self.wall_ns = wall_ns
        self.ways: list[AheadWay] = []
        self._now = 0
        everyone = AheadChoice(lambda: texts, clock=lambda: self._now)
        self.policies = [PreparedSize(FixedSize(2), everyone) for _ in range(texts)]

    def run(self, rounds: int) -> Counter[AheadWay]:
        """How often rounds had each way, in hundredths."""
        for _ in range(rounds):
            choices = [policy.choose(100) for policy in self.policies]
            self._now += self.wall_ns[choices[0].ahead]
            for policy, choice in zip(self.policies, choices, strict=True):
                policy.observe(replace(DRAFTED, ahead=choice.ahead), KEPT)
            self.ways += [choice.ahead for choice in choices]
        last = Counter(self.ways[-rounds * len(self.policies) :])
        return Counter({way: 100 * count // last.total() for way, count in last.items()})


@pytest.mark.parametrize("texts", [1, 16])
@pytest.mark.parametrize(
    ("wall_ns", "best"),
    [
        ((100, 130, 140), AheadWay.NOTHING),
        ((100, 99, 98), AheadWay.NOTHING),
        ((100, 70, 90), AheadWay.HELD),
        ((100, 70, 69), AheadWay.HELD),
        ((100, 80, 60), AheadWay.SENT),
        ((100, 120, 60), AheadWay.SENT),
    ],
)
def test_the_fastest_way_is_found_and_kept(
    texts: int, wall_ns: tuple[int, ...], best: AheadWay
) -> None:
    world = World(texts, *wall_ns)
    world.run(200)
    assert world.run(1_700)[best] >= 98


def test_a_world_that_changes_is_noticed() -> None:
    world = World(1, 100, 130, 130)
    world.run(200)
    world.wall_ns = 100, 130, 90
    world.run(5_000)  # each way is tried again within 3,300 rounds
    assert world.run(500)[AheadWay.SENT] > 90


def test_rounds_without_a_draft_teach_nothing() -> None:
    world = World(1, 100, 70, 70)
    policy = world.policies[0]
    for _ in range(100):
        assert policy.choose(1).ahead is AheadWay.NOTHING
        policy.observe(None, VerdictReply(0, 0, 3))
    assert world.run(1)[AheadWay.NOTHING] == 100


def test_drafts_that_were_not_prepared_as_asked_teach_what_was_done() -> None:
    """A drafter without AHEAD, among others."""
    world = World(1, 100, 70, 70)
    policy = world.policies[0]
    for _ in range(200):
        policy.choose(100)
        policy.observe(DRAFTED, KEPT)
    assert {policy.choose(100).ahead for _ in range(3)} == {AheadWay.HELD}, "still untried"


def test_what_a_target_drafts_itself_teaches_nothing() -> None:
    world = World(1, 100, 70, 70)
    policy = world.policies[0]
    for _ in range(200):
        assert policy.choose(100).ahead is AheadWay.NOTHING
        policy.observe(replace(DRAFTED, asked=DraftSize(2)), KEPT)


@pytest.mark.parametrize("way", AheadWay)
def test_a_setting_fixes_the_way(way: AheadWay) -> None:
    policy = PreparedSize(FixedSize(2), AheadChoice(lambda: 1, way))
    for _ in range(100):
        assert policy.choose(100).ahead is way
        policy.observe(replace(DRAFTED, ahead=way), KEPT)
    assert policy.choose(1).ahead is AheadWay.NOTHING
