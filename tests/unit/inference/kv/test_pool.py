"""The KV pool: extents that never overlap and that merge again; and its size."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tandem.errors import StartupError
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import KVPool, SequenceCache
from tests.support.decoders import decoder_over
from tests.support.devices.recording import Recording
from tests.support.models.tiny import random_llama


def reserved(pool: KVPool, capacity: int) -> SequenceCache:
    cache = pool.reserve(capacity)
    assert cache is not None
    return cache


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("slots", "to"),
    [
        ((2, 3, 4), 7),  # in a line, apart
        ((5, 6, 7), 0),
        ((2, 3, 4), 3),  # in a line, over itself
        ((4, 5, 6), 3),
        ((4, 3, 6), 7),
        ((1,), 0),
    ],
)
def test_positions_are_moved_as_they_were_before(
    slots: tuple[int, ...], to: int, together: bool
) -> None:
    pool = KVPool(10)
    pool._allocate(torch.zeros(2, 1, 3), torch.zeros(2, 1, 4))
    if together:
        pool = pool.resized(10)
    for layer in (*pool.keys, *pool.values):
        layer.copy_(torch.randn_like(layer))
    before = [layer.clone() for layer in (*pool.keys, *pool.values)]
    pool.move(slots, range(to, to + len(slots)))
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        expected = old.clone()
        expected[:, to : to + len(slots)] = old[:, list(slots)]
        assert new.equal(expected)


def test_an_extent_is_the_first_that_fits() -> None:
    pool = KVPool(10)
    first, second, third = (reserved(pool, size) for size in (3, 2, 5))
    assert [cache.start for cache in (first, second, third)] == [0, 3, 5]
    assert pool.free_positions == 0
    pool.release(third)
    pool.release(first)
    assert reserved(pool, 2).start == 0
    assert reserved(pool, 2).start == 5, "the gap of 1 is too small"
    assert reserved(pool, 1).start == 2
    assert pool.free_positions == 3


def test_fragments_do_not_make_an_extent() -> None:
    pool = KVPool(9)
    caches = [reserved(pool, 3) for _ in range(3)]
    pool.release(caches[0])
    pool.release(caches[2])
    assert pool.free_positions == 6
    assert pool.reserve(4) is None
    pool.release(caches[1])
    assert reserved(pool, 9).start == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0)])
def test_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    pool = KVPool(6)
    caches = [reserved(pool, size) for size in (1, 2, 3)]
    for i in order:
        pool.release(caches[i])
    assert reserved(pool, 6).start == 0


def test_a_new_sequence_is_empty_and_a_rollback_only_shortens() -> None:
    cache = reserved(KVPool(8), 8)
    assert cache.length == 0
    cache.length = 5
    cache.rollback(7)
    assert cache.length == 5
    cache.rollback(2)
    assert cache.length == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_pool_behaves_like_a_row_of_marks(seed: int) -> None:
    rng = random.Random(seed)
    pool, marks = KVPool(40), [False] * 40
    held: list[SequenceCache] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            cache = held.pop(rng.randrange(len(held)))
            marks[cache.start : cache.start + cache.capacity] = [False] * cache.capacity
            pool.release(cache)
        else:
            capacity = rng.randint(1, 12)
            gaps = (i for i in range(41 - capacity) if not any(marks[i : i + capacity]))
            expected, found = next(gaps, None), pool.reserve(capacity)
            assert (None if found is None else found.start) == expected
            if found is not None:
                marks[found.start : found.start + capacity] = [True] * capacity
                held.append(found)
        assert pool.free_positions == marks.count(False)


def test_states_are_written_in_place() -> None:
    pool = KVPool(6)
    keys, values = torch.ones(1, 2, 3, 4), torch.full((1, 2, 3, 5), 2.0)
    pool.slots = torch.tensor([4, 0, 5])
    layer = pool.update(keys, values, 0)[0]
    assert pool.bytes_per_position == 2 * (4 + 5) * 4
    pool.slots = torch.tensor([1])
    again, _ = pool.update(3 * keys[:, :, :1], values[:, :, :1], 0)
    assert again.data_ptr() == layer.data_ptr()
    assert again[0, [0, 1, 4, 5], 0].tolist() == [1, 3, 1, 1]


def test_a_resized_pool_has_the_same_layers_at_once() -> None:
    pool = KVPool(2)
    pool.slots = torch.tensor([0])
    pool.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 5), 0)
    larger = pool.resized(7)
    assert [tuple(states.shape) for states in (*larger.keys, *larger.values)] == [
        (2, 8, 4),  # a slot more, for padding
        (2, 8, 5),
    ]
    assert larger.free_positions == 7
    assert larger.bytes_per_position == pool.bytes_per_position


def test_positions_are_moved_in_all_layers_by_few_operators() -> None:
    """Layers of two forms; of the moved positions one is written before it would be read."""
    made = KVPool(2)
    made.slots = torch.tensor([0])
    for layer, (heads, width) in enumerate(((2, 4), (2, 4), (1, 4))):
        made.update(torch.ones(1, heads, 1, width), torch.ones(1, heads, 1, 5), layer)
    pool = made.resized(7)
    layers = [*pool.keys, *pool.values]
    before = [states.normal_().clone() for states in layers]
    with Recording() as ran:
        pool.move([4, 3, 6], range(2, 5))
    for states, old in zip(layers, before, strict=True):
        assert states[:, 2:5].equal(old[:, [4, 3, 6]])
        assert states[:, [0, 1, 5, 6]].equal(old[:, [0, 1, 5, 6]])
    names = Counter(function.overloadpacket.__name__ for function, *_ in ran.operators)
    forms = 4
    assert names["index_select"] == names["copy_"] == forms < len(layers)


def test_a_cache_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.inference.kv.size.free_memory", lambda _: 2**30)
    numbers = r"10000000 tokens takes 1\.2 GiB, cpu has 1\.0 GiB free; lower CACHE_TOKENS"
    with pytest.raises(StartupError, match=numbers):
        decoder_over(random_llama(1), "large", cache_tokens=10_000_000)


@torch.inference_mode()
def test_a_large_pool_begins_with_a_page_for_each_head() -> None:
    """Or a text would take one more of each; a small pool has no page to spare."""
    rows = []
    for tokens, aligned in ((600_000, True), (600, False)):
        decoder = decoder_over(random_llama(1), "pages", cache_tokens=tokens, engine="torch")
        pool = decoder.pool
        begins = [head.data_ptr() for states in (*pool.keys, *pool.values) for head in states]
        assert all(begin % (2 << 20) == 0 for begin in begins) == aligned
        assert {states.shape for states in pool.keys} == {(2, tokens + 1, 8)}
        cache = decoder.reserve(20)
        assert cache is not None
        decoder.forward([Feed(cache, [1, 2, 3, 4], 0)])
        cache.pool.move(range(4), range(10, 14))
        for states in (*pool.keys, *pool.values):
            assert states[:, 10:14].equal(states[:, :4])
        rows.append(decoder.forward([Feed(cache, [2, 1], 2)]).logits)
    assert rows[0].equal(rows[1])


def test_the_cache_is_sized_to_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # One layer of two heads of 8, keys and values, float32: 128 bytes a position.
    monkeypatch.setattr("tandem.inference.kv.size.free_memory", lambda _: 2 * 128 * 50)
    assert decoder_over(random_llama(1), "small", at_most=1000).pool.positions == 50
    assert decoder_over(random_llama(1), "small", at_most=20).pool.positions == 20
