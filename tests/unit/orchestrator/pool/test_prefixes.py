"""Texts that begin alike go to the replica that was sent their beginning, if it is not too busy."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest

from orchestrator.pool import prefixes
from orchestrator.pool.prefixes import BLOCK, MOST_PROCESSES, Prefix, SentPrefixes
from tandem.errors import Unavailable
from tandem.peers.replicas.replica import Replica
from tests.unit.orchestrator.pool.test_pool import PLACES, Made, made

__all__ = ["made"]


def text(blocks: int, seed: int = 0, **changes: Any) -> Prefix:
    """A text of a number of blocks; those of a seed begin alike."""
    numbers = random.Random(seed)
    return Prefix([numbers.randrange(2**32) for _ in range(blocks * BLOCK)], **changes)


def held(stack: ExitStack, replica: Replica[Any], texts: int) -> None:
    for _ in range(texts):
        stack.enter_context(replica.serve())


def test_a_hash_is_of_a_full_block_and_all_before_it() -> None:
    tokens = [*range(3 * BLOCK)]
    whole = Prefix(tokens)
    assert len(whole.blocks) == 3
    assert Prefix(tokens[:-1]).blocks == whole.blocks[:2]
    assert Prefix([*tokens, 1]).blocks == whole.blocks
    for changed in (0, BLOCK, 2 * BLOCK):
        other = Prefix([*tokens[:changed], 7_000_000, *tokens[changed + 1 :]])
        same = changed // BLOCK
        assert other.blocks[:same] == whole.blocks[:same]
        assert not set(other.blocks[same:]) & set(whole.blocks)
    again = Prefix(tokens[BLOCK:])  # the same blocks after nothing
    assert not set(again.blocks) & set(whole.blocks)
    assert not set(Prefix(tokens, "salt").blocks) & set(whole.blocks)


def test_a_text_that_grows_has_the_hashes_of_the_whole() -> None:
    tokens = [*range(5 * BLOCK)]
    growing = Prefix(())
    for length in (BLOCK - 1, BLOCK, 2 * BLOCK + 5, 2 * BLOCK + 5, 5 * BLOCK):
        growing.grow(tokens[:length])
    assert growing.blocks == Prefix(tokens).blocks


async def test_the_longest_chain_is_found(made: Made) -> None:
    one, other = made.target(incarnation=1), made.target(incarnation=2)
    sent = SentPrefixes()
    sent.note(text(2), one)
    sent.note(text(5), other)
    assert sent.found(text(8)) == {1: 2, 2: 5}
    assert sent.found(text(1)) == {1: 1, 2: 1}
    assert sent.found(text(3, seed=1)) == {}
    assert sent.found(text(8, salt="theirs")) == {}


async def test_it_is_bounded_and_ends_are_forgotten_before_beginnings(made: Made) -> None:
    one = made.target(incarnation=1)
    sent = SentPrefixes(most=10)
    sent.note(text(6), one)
    sent.note(text(6, seed=1), one)
    assert len(sent) == 10
    assert sent.found(text(6)) == {1: 4}
    assert sent.found(text(6, seed=1)) == {1: 6}
    sent.note(text(4), one)  # used again, so the other one's end is the next to go
    sent.note(text(2, seed=2), one)
    assert sent.found(text(6)) == {1: 4}
    assert sent.found(text(6, seed=1)) == {1: 4}
    sent.note(text(50, seed=3), one)
    assert len(sent) == 10
    assert sent.found(text(50, seed=3)) == {1: 10}


async def test_a_beginning_is_remembered_of_some_processes_the_last_first(made: Made) -> None:
    sent = SentPrefixes()
    for process in range(1, MOST_PROCESSES + 3):
        sent.note(text(1), made.target(incarnation=process))
    sent.note(text(1), made.target(incarnation=3))
    assert set(sent.found(text(1))) == set(range(3, MOST_PROCESSES + 3))
    sent.note(text(1), made.target(incarnation=1))
    assert set(sent.found(text(1))) == {1, 3, *range(5, MOST_PROCESSES + 3)}


async def test_a_process_that_is_gone_is_not_chosen(made: Made) -> None:
    one, other = made.target(incarnation=1), made.target(incarnation=2)
    sent = SentPrefixes()
    with one.serve():
        sent.note(text(4), one)
        assert sent.choose([one, other], text(4)) is one
        one.reply.info.incarnation = 3  # another process at its address has computed nothing
        assert sent.choose([one, other], text(4)) is other
    assert sent.choose([other], text(4)) is other
    assert sent.choose([], text(4)) is None


async def test_one_that_names_no_incarnation_is_not_remembered(made: Made) -> None:
    sent = SentPrefixes()
    sent.note(text(4), made.target())
    assert len(sent) == 0


async def test_the_warm_one_is_chosen_until_it_is_a_quarter_busier_than_the_mean(
    made: Made,
) -> None:
    warm, cold = made.target(incarnation=1), made.target(incarnation=2)
    sent = SentPrefixes()
    sent.note(text(4), warm)
    given = []
    with ExitStack() as stack:
        for _ in range(16):
            chosen = sent.choose([warm, cold], text(4))
            assert chosen is not None
            given.append(chosen)
            held(stack, chosen, 1)
        assert sent.choose([warm, cold], None) is cold
    assert given.count(warm) == PLACES  # of 16 texts 1.25 * 8
    assert given[:2] == [warm, warm]
    assert given[2] is cold


async def test_slots_count_by_their_share(made: Made) -> None:
    small = made.target(incarnation=1, max_sequences=2)
    large = made.target(incarnation=2, max_sequences=20)
    sent = SentPrefixes()
    sent.note(text(4), large)
    with ExitStack() as stack:
        held(stack, large, 8)
        assert sent.choose([small, large], text(4)) is large
    sent.note(text(6), small)
    with ExitStack() as stack:
        held(stack, small, 1)
        assert sent.choose([small, large], text(6)) is large


async def test_a_short_beginning_is_no_reason_to_wait_for_others(made: Made) -> None:
    """A quarter of the prompt at least, over what the least loaded one has of it."""
    warm, cold = made.target(incarnation=1), made.target(incarnation=2)
    sent = SentPrefixes()
    sent.note(text(5), warm)
    with warm.serve():
        assert sent.choose([warm, cold], text(19)) is warm
        assert sent.choose([warm, cold], text(20)) is cold
        sent.note(text(3), cold)
        assert sent.choose([warm, cold], text(7)) is warm
        assert sent.choose([warm, cold], text(8)) is cold


async def test_those_as_warm_are_chosen_by_load(made: Made) -> None:
    replicas = [made.target(incarnation=at) for at in (1, 2, 3)]
    sent = SentPrefixes()
    for replica in replicas[:2]:
        sent.note(text(4), replica)
    with replicas[0].serve(), replicas[2].serve():
        assert sent.choose(replicas, text(4)) is replicas[1]


async def test_texts_of_one_key_prefer_one_replica(made: Made) -> None:
    one, other = made.target(incarnation=1), made.target(incarnation=2)
    sent = SentPrefixes()
    sent.note(text(0, key="k"), one)
    sent.note(text(2), other)
    with one.serve():
        assert sent.choose([one, other], text(4, key="k")) is one
        assert sent.choose([one, other], text(0, key="k")) is one
        assert sent.choose([one, other], text(0, key="k", salt="theirs")) is other
        assert sent.choose([one, other], text(0, key="other")) is other
    sent.note(text(0, key="k"), other)
    # The key knows both: what each was sent of the text decides.
    with other.serve():
        assert sent.choose([one, other], text(4, key="k")) is other


async def test_room_failures_and_zones_come_first(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = made.drafter(incarnation=1, zone="b")
    cold = made.drafter(incarnation=2, zone="a")
    sent = SentPrefixes()
    sent.note(text(4), warm)
    both = [warm, cold]
    assert sent.choose(both, text(4)) is warm
    assert sent.choose(both, text(4), "a") is cold
    assert sent.choose(both, text(4), "b") is warm
    monkeypatch.setattr(prefixes, "SHARE", 100.0)
    with ExitStack() as stack:
        held(stack, warm, PLACES)
        assert sent.choose(both, text(4)) is cold
    with pytest.raises(Unavailable), warm.serve():
        raise Unavailable("gone")
    assert sent.choose(both, text(4)) is cold
