"""Prefixes that texts share, against a plain dict of what each position holds: in extents, in
tables of blocks, and in tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.inference.kv.blocks import Blocks
from tandem.inference.kv.extents import Extents, PositionPool, SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.inference.kv.tables import Tables

# What is computed at a position hangs on all tokens up to it; the salt is noted beside them.
Held = tuple[str, tuple[int, ...]]
BLOCK = 2


class Memory:
    """What slots hold, instead of keys and values."""

    def __init__(self, pool: PositionPool) -> None:
        self.held: dict[int, Held] = {}
        pool.move = self.move  # type: ignore[method-assign]

    def write(self, slot: int, held: Held) -> None:
        self.held[slot] = held

    def read(self, slot: int) -> Held | None:
        return self.held.get(slot)

    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        self.held |= dict(zip(to, [self.held[slot] for slot in slots], strict=True))


class Tensors(Memory):
    """The same in the keys of a pool, by number."""

    def __init__(self, pool: KVPool) -> None:
        self._pool, self._all = pool, list[Held]()

    def write(self, slot: int, held: Held) -> None:
        self._all.append(held)
        self._pool.slots = torch.tensor([slot])
        states = torch.full((1, 1, 1), float(len(self._all)))
        self._pool.write(0, states, states)

    def read(self, slot: int) -> Held | None:
        key, value = (states[0][0, slot, 0] for states in (self._pool.keys, self._pool.values))
        assert key == value
        return self._all[int(key) - 1]


class HostExtents(Extents):
    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        raise AssertionError("see `Memory`")


class HostTables(Tables):
    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        raise AssertionError("see `Memory`")


def extents(positions: int) -> tuple[PositionPool, Memory]:
    pool = HostExtents(positions, BLOCK)
    return pool, Memory(pool)


def tables(positions: int) -> tuple[PositionPool, Memory]:
    pool = HostTables(positions, BLOCK)
    return pool, Memory(pool)


def tensors(positions: int) -> tuple[PositionPool, Memory]:
    pool = KVPool(positions)
    pool.blocks = Blocks(BLOCK)
    return pool, Tensors(pool)


FORMS = [extents, tables, tensors]
Form = Callable[[int], tuple[PositionPool, Memory]]


@dataclass(eq=False)
class Text:
    salt: str
    tokens: list[int]
    cache: SequenceCache
    forgotten: int = 0


@dataclass
class World:
    """Texts over a pool, and what must be true of them.

    Attributes:
        published: beginnings of texts that can be found as long as nothing is forgotten.
    """

    pool: PositionPool
    memory: Memory
    texts: list[Text] = field(default_factory=list)
    published: set[Held] = field(default_factory=set)

    def open(self, salt: str, prompt: list[int], room: int, held: int | None = None) -> Text | None:
        """A text with its prompt computed, as far as it was not found; it holds so many positions
        after that, or all."""
        least = None if held is None else len(prompt) + held
        cache = self.pool.reserve(len(prompt) + room, least)
        if cache is None:
            return None
        text = Text(salt, prompt, cache)
        self.texts.append(text)
        found = cache.adopt(prompt, salt)
        assert found == cache.length == cache.found < len(prompt)
        assert found % BLOCK == 0
        self.check()
        self.feed(text, prompt[found:])
        self.publish(text)
        return text

    def expected(self, salt: str, prompt: Sequence[int]) -> int:
        """Positions that are found where nothing is forgotten."""
        found = 0
        for end in range(BLOCK, len(prompt), BLOCK):
            if (salt, tuple(prompt[:end])) not in self.published:
                break
            found = end
        return found

    def feed(self, text: Text, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """As a pass writes it."""
        cache = text.cache
        paths = [tuple(text.tokens[: cache.length])]  # of the trunk, then of each branch row
        for parent, token in zip(cache.branches.parents, cache.branch_tokens, strict=True):
            paths.append((*paths[parent], token))
        first = cache.length + (len(cache.branches) if parents else 0)
        for number, slot in enumerate(cache.slots(first, len(tokens))):
            path = paths[parents[number]] if parents else paths[0]
            row = (*path, tokens[number])
            self.memory.write(slot, (text.salt, row))
            if parents:
                paths.append(row)
            else:
                paths[0] = row
        cache.grow(tokens, parents)

    def publish(self, text: Text) -> None:
        text.cache.publish(text.tokens, len(text.tokens))
        ends = range(BLOCK, min(len(text.tokens), text.cache.length) + 1, BLOCK)
        self.published |= {
            (text.salt, tuple(text.tokens[:end])) for end in ends if end > text.forgotten
        }

    def forget(self) -> None:
        """As an administrator may, at any time: what texts publish later is found again, once there
        is another text with all that comes before it."""
        kept = self.pool.kept_positions
        assert self.pool.forget() == kept
        assert self.pool.kept_positions == 0
        self.published.clear()
        for text in self.texts:
            text.forgotten = len(text.cache.blocks) * BLOCK

    def round(self, text: Text, tokens: list[int], parents: list[int], kept: int) -> None:
        """A tree of drafted tokens, of which a path is kept; another token follows it."""
        cache = text.cache
        self.feed(text, tokens, parents)
        path = [kept] if kept else []
        while path and parents[path[0] - 1]:
            path.insert(0, parents[path[0] - 1])
        cache.keep(path)
        text.tokens += [tokens[row - 1] for row in path]
        self.publish(text)

    def chain(self, text: Text, tokens: list[int], kept: int) -> None:
        """A drafted chain in the trunk, of which a part is kept."""
        end = text.cache.length + kept
        before = text.tokens
        text.tokens = [*before, *tokens]
        self.feed(text, tokens)
        text.cache.rollback(end)
        text.tokens = text.tokens[:end]
        self.publish(text)

    def close(self, text: Text) -> None:
        self.texts.remove(text)
        self.pool.release(text.cache)

    def check(self) -> None:
        """Each text holds what it would have computed alone; and all positions are accounted."""
        for text in self.texts:
            cache = text.cache
            for at, slot in enumerate(cache.slots(0, cache.length)):
                assert self.memory.read(slot) == (text.salt, tuple(text.tokens[: at + 1]))
        caches = [text.cache for text in self.texts]
        reserved = sum(cache.capacity for cache in caches if cache.table is None)
        reserved += BLOCK * len({block for cache in caches for block in cache.table or ()})
        assert self.pool.free_positions == self.pool.positions - reserved
        assert 0 <= self.pool.kept_positions <= self.pool.free_positions


TOKENS = st.integers(0, 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=9)


def play(data: st.DataObject, world: World, *, roomy: bool) -> None:
    """Random texts."""
    for _ in range(data.draw(st.integers(1, 25))):
        texts = world.texts
        act = data.draw(st.sampled_from(["open", "round", "chain", "grow", "close", "forget"]))
        if act == "open" or not texts:
            prompt, salt = data.draw(PROMPTS), data.draw(st.sampled_from(["", "of others"]))
            expected = world.expected(salt, prompt)
            held = data.draw(st.none() | st.integers(0, 12))
            text = world.open(salt, prompt, 12, held)
            if roomy:
                assert text is not None
                assert text.cache.found == expected
            world.check()
            continue
        text = data.draw(st.sampled_from(texts))
        cache = text.cache
        if act == "grow":
            before = cache.capacity
            wanted = data.draw(st.integers(before, cache.promised))
            if grown := world.pool.grow(cache, wanted):
                assert wanted <= cache.capacity <= cache.promised
            assert grown or (cache.capacity == before and not roomy)
            world.check()
            continue
        left = cache.capacity - cache.length
        if act == "close":
            world.close(text)
        elif act == "forget":
            world.forget()
        elif left >= 4:
            tokens = data.draw(st.lists(TOKENS, min_size=1, max_size=4))
            kept = data.draw(st.integers(0, len(tokens)))
            if act == "chain":
                world.chain(text, tokens, kept)
            else:
                parents = [data.draw(st.integers(0, row)) for row in range(len(tokens))]
                world.round(text, tokens, parents, kept)
        world.check()


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_texts_find_what_was_computed_and_nothing_else(form: Form, data: st.DataObject) -> None:
    play(data, World(*form(1000)), roomy=True)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_kept_yields_to_texts(form: Form, data: st.DataObject) -> None:
    world = World(*form(64))
    play(data, world, roomy=False)
    for text in list(world.texts):
        world.close(text)
    assert world.pool.free_positions == world.pool.positions
    whole = world.open("", [1] * 64, 0)
    assert whole is not None, "kept prefixes are free positions"
    assert world.pool.free_positions == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_text_grows_while_there_is_room_and_keeps_what_it_holds(form: Form) -> None:
    world = World(*form(32))
    text, other = world.open("", [0, 1, 1], 21, 1), world.open("", [1], 7, 1)
    assert text is not None
    assert other is not None
    for length in range(3, 24):
        assert world.pool.grow(text.cache, length + 1)
        world.feed(text, [1])
        text.tokens = [*text.tokens, 1]
        world.publish(text)
        world.check()
    assert text.cache.capacity == text.cache.promised
    world.close(text)
    assert world.pool.grow(other.cache, other.cache.promised), "what is kept yields"
    found = world.open("", [0, *[1] * 9], 0)
    assert found is not None
    world.check()


@pytest.mark.parametrize("form", FORMS)
def test_a_text_does_not_grow_into_what_others_hold(form: Form) -> None:
    world = World(*form(32))
    text, other = world.open("", [0], 29, 1), world.open("", [1] * 15, 3)
    assert text is not None
    assert other is not None
    held = text.cache.capacity
    assert not world.pool.grow(text.cache, 16)
    assert text.cache.capacity == held
    world.check()
    world.close(other)
    assert world.pool.grow(text.cache, 30)
    world.check()


@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_does_not_fit_makes_nobody_forget(form: Form) -> None:
    world = World(*form(32))
    kept, held = world.open("", [0] * 8, 0), world.open("", [1] * 8, 0)
    assert kept is not None
    assert held is not None
    world.close(kept)
    assert world.pool.kept_positions == 8
    assert world.pool.reserve(26) is None
    assert world.pool.kept_positions == 8


@pytest.mark.parametrize("form", FORMS)
def test_room_that_holds_nothing_goes_first_then_what_was_used_longest_ago(form: Form) -> None:
    world = World(*form(26))

    def opened(prompt: list[int], room: int) -> Text:
        text = world.open("", prompt, room)
        assert text is not None
        return text

    often, once = [0] * 7, [1] * 7
    for prompt in (often, once, often):
        world.close(opened(prompt, 1))
    passing = opened([0], 7)
    opened([0, 1] * 3, 0)
    assert world.pool.kept_positions == 12
    opened([1, 0] * 3, 0)
    assert not list(world.pool.blocks.along(once, ""))
    world.close(passing)
    assert opened(often, 1).cache.found == 6


@pytest.mark.parametrize("form", FORMS)
def test_the_end_of_a_chain_is_forgotten_before_its_beginning(form: Form) -> None:
    world = World(*form(8))
    text = world.open("", [0] * 7, 1)
    assert text is not None
    world.close(text)
    assert world.pool.reserve(4) is not None
    assert len(list(world.pool.blocks.along([0] * 7, ""))) == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_that_goes_on_is_kept_once(form: Form) -> None:
    world, chat = World(*form(64)), [0, 1, 1, 0, 1]
    for _ in range(3):
        text = world.open("", list(chat), 4)
        assert text is not None
        assert text.cache.found == (len(chat) - 1) // BLOCK * BLOCK * (len(chat) > 5)
        world.chain(text, [1, 0], 2)
        chat = [*text.tokens, 1]
        world.close(text)
        assert world.pool.kept_positions == len(text.tokens) // BLOCK * BLOCK
    text = world.open("of others", list(chat), 0)
    assert text is not None
    assert text.cache.found == 0


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_shared_without_a_salt(form: Form) -> None:
    pool, _ = form(64)
    for salt in (None, ""):
        cache = pool.reserve(8)
        assert cache is not None
        assert cache.adopt([1] * 8, salt) == 0
        cache.length = 8
        cache.publish([1] * 8, 8)
        pool.release(cache)
        assert pool.kept_positions == (0 if salt is None else 8)


@pytest.mark.parametrize("form", FORMS)
def test_what_others_may_find_is_not_taken_back(form: Form) -> None:
    pool, _ = form(64)
    cache = pool.reserve(8)
    assert cache is not None
    cache.adopt([1], "")
    cache.length = 5
    cache.publish([1] * 5, 5)
    cache.rollback(4)
    take_back: list[Callable[[], None]] = [
        lambda: cache.rollback(3),
        lambda: cache.reopen(3, [1]),
    ]
    for way in take_back:
        with pytest.raises(ValueError, match="positions from 3 on are shared"):
            way()


def test_a_hit_is_told_by_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.inference.kv.blocks._behind", lambda key, tokens: b"the same")
    blocks = Blocks(2)
    blocks.add([], [1, 2], "", 0)
    assert [block.place for block in blocks.along([1, 2, 3], "")] == [0]
    assert list(blocks.along([2, 1, 3], "")) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_text_takes_no_more_of_a_prefix_than_it_holds(form: Form) -> None:
    """One that opens late, as a target's own drafter does, may have outgrown what it holds."""
    world = World(*form(64))
    before = world.open("", [1] * 20, 0)
    assert before is not None
    cache = world.pool.reserve(30, 6)
    assert cache is not None
    world.texts.append(Text("", [1] * 20, cache))
    assert world.open("", [0] * 10, 0) is not None
    assert cache.adopt([1] * 20, "") == 6
    world.check()


def test_a_long_text_is_moved_in_pieces_over_itself() -> None:
    """Down and up, by less than a piece."""
    pool = KVPool(2000)
    for start in (0, 30, 10):
        states = torch.arange(2000.0)[None, :, None]
        pool.slots = torch.arange(2000)
        pool.write(0, states, states)
        pool.move(range(20, 920), range(start, start + 900))
        assert pool.keys[0][0, start : start + 900, 0].equal(torch.arange(20.0, 920.0))


def test_an_extent_grows_in_place_into_a_gap_that_is_large_enough() -> None:
    pool, _ = extents(64)
    text, between, behind = pool.reserve(30, 4), pool.reserve(8), pool.reserve(20)
    assert text is not None
    assert between is not None
    assert behind is not None
    pool.release(between)
    assert pool.grow(text, 10)
    assert (text.start, text.capacity, pool.free_positions) == (0, 10, 34)
    assert pool.grow(text, 13), "elsewhere: two are left, then another one begins"
    assert (text.start, pool.free_positions) == (32, 64 - 20 - text.capacity)
