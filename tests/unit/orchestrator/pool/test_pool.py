"""Which replica gets the next text, and which gets none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import groupby, pairwise
from typing import Any

import pytest

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import InvalidRequest, Unavailable
from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.replicas.agreement import agree
from tandem.peers.replicas.compatibility import capabilities_of, law_of
from tandem.peers.replicas.replica import Replica
from tandem.rpc.feedback import spec_to
from tandem.target.v1 import target_pb2
from tests.support.waiting import HANG_SECONDS

PLACES = 10


def info(**changes: Any) -> common_pb2.ModelInfo:
    fields: dict[str, Any] = {
        "model": "m",
        "protocol_version": 2,
        "vocab_size": 5,
        "max_length": 100,
        "max_gamma": 8,
        "max_sequences": PLACES,
        "max_message_bytes": 1 << 20,
        "fingerprint": "abc",
    }
    return common_pb2.ModelInfo(**(fields | changes))


class Made:
    """Replicas that no server stands for."""

    def __init__(self) -> None:
        self.replicas: list[Replica[Any]] = []

    def target(self, **changes: Any) -> Replica[TargetClient]:
        replica = Replica(TargetClient("127.0.0.1:1"), lambda: None, 0.1)
        replica.reply = target_pb2.GetModelInfoResponse(info=info(**changes))
        self.replicas.append(replica)
        return replica

    def drafter(self, **changes: Any) -> Replica[DrafterClient]:
        replica = Replica(DrafterClient("127.0.0.1:1"), lambda: None, 0.1)
        replica.reply = drafter_pb2.GetModelInfoResponse(info=info(**changes))
        self.replicas.append(replica)
        return replica


@pytest.fixture
async def made() -> AsyncIterator[Made]:
    made = Made()
    yield made
    for replica in made.replicas:
        await replica.close()


def first(*replicas: Replica[Any], zone: str = "") -> Replica[Any]:
    return min(replicas, key=lambda replica: replica.order(zone))


async def test_the_one_with_the_fewest_texts_is_picked(made: Made) -> None:
    one, other = made.target(), made.target()
    with one.serve():
        assert first(one, other) is other
        with other.serve(), other.serve():
            assert first(one, other) is one


async def test_any_of_several_that_are_as_busy(made: Made) -> None:
    targets = [made.target() for _ in range(3)]
    assert {id(first(*targets)) for _ in range(200)} == {id(target) for target in targets}


async def test_several_that_are_as_busy_take_turns(made: Made) -> None:
    targets = [made.target() for _ in range(3)]
    given = []
    for _ in range(9):
        given.append(first(*targets))
        with given[-1].serve():
            await asyncio.sleep(0.001)
    assert {given.count(target) for target in targets} == {3}
    assert all(before is not after for before, after in pairwise(given))


async def test_load_is_the_share_of_places(made: Made) -> None:
    small, large = made.target(max_sequences=2), made.target(max_sequences=20)
    with small.serve(), large.serve(), large.serve():
        assert first(small, large) is large


async def test_texts_of_other_callers_count_for_a_while(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, free = made.target(), made.target()
    with busy.serve():
        busy.note_load(7)  # ours is one of them
    assert busy.load == pytest.approx(6 / PLACES)
    with free.serve(), free.serve():
        assert first(busy, free) is free
        monkeypatch.setattr("tandem.peers.replicas.replica._TOLD_SECONDS", 0.0)
        assert first(busy, free) is busy


async def test_one_that_has_failed_does_not_attract_all_texts(made: Made) -> None:
    gone, other = made.target(), made.target()
    with pytest.raises(Unavailable), gone.serve():
        raise Unavailable("gone")
    with other.serve():
        assert first(gone, other) is other


async def test_a_bad_request_is_not_the_replicas_failure(made: Made) -> None:
    replica = made.target()
    with pytest.raises(InvalidRequest), replica.serve():
        raise InvalidRequest("temperature")
    assert not replica.shunned
    assert replica.idle.is_set()


async def test_a_drafter_in_the_targets_zone_is_preferred_while_it_has_room(made: Made) -> None:
    near, far, unsaid = made.drafter(zone="a"), made.drafter(zone="b"), made.drafter()
    with near.serve(), unsaid.serve(), unsaid.serve():
        assert first(near, far, zone="a") is near
        assert first(far, unsaid, zone="a") is unsaid
        assert first(near, far, zone="") is far
        near.note_load(PLACES + 1)
        assert first(near, far, zone="a") is far


async def test_the_law_of_most_is_the_first(made: Made) -> None:
    odd, *even = (made.target(fingerprint=name) for name in ("x", "y", "y"))
    agreed = agree([odd, *even], [], None)
    assert agreed.targets == even
    assert "differs from the others in fingerprint: x and y" in str(agreed.misfits[odd])


async def test_of_equally_many_the_first_to_be_named(made: Made) -> None:
    one, other = made.target(fingerprint="x"), made.target(fingerprint="y")
    assert agree([one, other], [], None).targets == [one]


async def test_the_present_law_stays_until_more_targets_have_another(made: Made) -> None:
    old, *new = (made.target(fingerprint=name) for name in ("x", "y", "y"))
    present = law_of(old.reply)
    assert agree([new[0], old], [], present).targets == [old]
    agreed = agree([old, *new], [], present)
    assert (agreed.targets, agreed.others) == (new, [old])
    assert agree(new, [], present).targets == new
    assert agree([], [], present).law == present


@pytest.mark.parametrize("surge", [True, False])
@pytest.mark.parametrize("replicas", range(1, 8))
async def test_a_rollout_moves_new_texts_once_and_to_most_replicas(
    made: Made, replicas: int, surge: bool
) -> None:
    """One pod after the other; with a surge the new one is ready before the old one goes."""
    ready = [made.target(fingerprint="old") for _ in range(replicas)]
    present = agree(ready, [], None).law
    chosen, fewest = [present], replicas
    for _ in range(replicas):
        added = made.target(fingerprint="new")
        steps = (
            [[*ready, added], [*ready[1:], added]] if surge else [ready[1:], [*ready[1:], added]]
        )
        for ready in steps:
            agreed = agree(ready, [], present)
            present = agreed.law
            chosen.append(agreed.law)
            fewest = min(fewest, len(agreed.targets))
            assert 2 * len(agreed.targets) >= len(ready)
            assert {*agreed.targets, *agreed.others} == {*ready}
    laws = [law for law, _ in groupby(chosen)]
    assert [law and law["fingerprint"] for law in laws] == ["old", "new"]
    # New texts always have half of the targets, with a surge at least one.
    assert fewest >= max(replicas // 2, surge)


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        ({"fingerprint": "other"}, "in fingerprint: other and abc"),
        ({"eos_token_ids": [3]}, r"in eos_token_ids: \[3\] and \[\]"),
        ({"dtype": "bfloat16"}, "in dtype: bfloat16 and "),
        ({"tokenizer_fingerprint": "t"}, "in tokenizer_fingerprint: t and "),
        ({"vocab_size": 6}, "in vocab_size: 6 and 5"),
        ({"protocol_version": 1}, "a target speaks protocol version 1"),
    ],
)
async def test_a_target_with_another_law_waits(
    made: Made, difference: dict[str, Any], sentence: str
) -> None:
    good, bad = made.target(), made.target(**difference)
    agreed = agree([good, bad], [], law_of(good.reply))
    assert agreed.targets == [good]
    with pytest.raises(Unavailable, match=sentence):
        raise agreed.misfits[bad]
    assert agreed.misfits[bad].__notes__ == ["127.0.0.1:1"]


async def test_drafters_have_to_fit_the_targets_that_serve(made: Made) -> None:
    target, good, bad = made.target(), made.drafter(), made.drafter(tokenizer_fingerprint="t")
    agreed = agree([target], [good, bad], None)
    assert agreed.drafters == [good]
    assert "another tokenizer" in str(agreed.misfits[bad])


async def test_drafters_that_read_hidden_states_read_the_same(made: Made) -> None:
    """As the first one of those that fit: one for another target has no say."""
    target, *drafters = made.target(hidden_size=8), *(made.drafter(hidden_size=8) for _ in range(4))
    target.reply.feedback_layers.extend([0, 1, 2])
    misfit, chosen, other, without = drafters
    for replica, layer in ((misfit, 3), (chosen, 1), (other, 2)):
        replica.reply.feedback.layers.append(layer)
        replica.reply.feedback.hidden_dtype = common_pb2.HIDDEN_DTYPE_BFLOAT16
    agreed = agree([target], drafters, None)
    assert agreed.drafters == [chosen, without]
    assert "reads hidden states of layer 3, and the target" in str(agreed.misfits[misfit])
    assert "reads other hidden states or predictions than the first" in str(agreed.misfits[other])
    replies = [replica.reply for replica in agreed.drafters]
    wanted = capabilities_of([target.reply], replies)
    assert spec_to(wanted.feedback) == chosen.reply.feedback
    assert wanted.takes(target.reply)
    target.reply.feedback_layers.pop(1)
    assert not wanted.takes(target.reply)


@pytest.mark.parametrize(
    ("learns", "says"), [((True, False), "does not learn"), ((False, True), "learns")]
)
async def test_of_replicas_of_a_head_all_learn_or_none(
    made: Made, learns: tuple[bool, bool], says: str
) -> None:
    """The sentence names the setting."""
    target, *drafters = made.target(hidden_size=8), *(made.drafter(hidden_size=8) for _ in range(2))
    target.reply.feedback_layers.append(1)
    for replica, own in zip(drafters, learns, strict=True):
        replica.reply.learns = own
        replica.reply.feedback.layers.append(1)
        replica.reply.feedback.hidden_dtype = common_pb2.HIDDEN_DTYPE_BFLOAT16
        if own:
            replica.reply.feedback.top = 64
            replica.reply.feedback.predicted_at = common_pb2.PREDICTED_AT_KEPT
    agreed = agree([target], drafters, None)
    assert agreed.drafters == drafters[:1]
    assert f"{says}, unlike the first one" in str(agreed.misfits[drafters[1]])
    assert "set ONLINE for all of them, or for none" in str(agreed.misfits[drafters[1]])


async def test_a_text_goes_on_only_where_its_limits_are_kept(made: Made) -> None:
    began = capabilities_of([made.target().reply], [])
    for changes, takes in (
        ({}, True),
        ({"model": "of another name"}, True),
        ({"max_length": 200, "max_gamma": 9}, True),
        ({"max_length": 99}, False),
        ({"max_gamma": 7}, False),
        ({"max_message_bytes": 1 << 19}, False),
        ({"fingerprint": "other"}, False),
    ):
        assert began.takes(made.target(**changes).reply) is takes


async def test_another_process_is_found_while_its_predecessor_is_held_off(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.peers.replicas.replica._WHO_SECONDS", 0.01)
    replica = made.target(incarnation=1)
    for _ in range(8):
        replica._breaker.open()
        replica._breaker.close()
    replica._breaker.open()
    assert replica._breaker.hold_seconds > 5
    asked = 0

    async def model_info(seconds: float) -> target_pb2.GetModelInfoResponse:
        nonlocal asked
        asked += 1
        return target_pb2.GetModelInfoResponse(info=info(incarnation=1 if asked < 4 else 2))

    async def trial(reply: target_pb2.GetModelInfoResponse, seconds: float) -> None:
        assert reply.info.incarnation == 2

    monkeypatch.setattr(replica.client, "model_info", model_info)
    monkeypatch.setattr(replica.client, "trial", trial)
    async with asyncio.timeout(HANG_SECONDS):
        await replica._ask()
    assert asked == 4
    assert not replica.shunned


async def test_a_drafter_without_room_is_not_picked(made: Made) -> None:
    drafter = made.drafter(max_sequences=1)
    assert not drafter.full
    with drafter.serve():
        assert drafter.full
    assert not drafter.full
    drafter.note_full()
    assert drafter.full
