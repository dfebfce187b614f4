"""Blocks of a pool that hold computed prefixes, found again by their tokens. Runs on the host only.

A block belongs to a chain: its key is a hash of the key before it and of its own tokens, and the
first one's key hangs on the salt, among whose texts alone it is shared, and on the version of the
weights. The model, with its adapter, is in no key: a pool is of one model.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_KEY_BYTES = 16


@dataclass(eq=False, slots=True)
class Block:
    """A full block of tokens that are computed and will not be taken back.

    Attributes:
        key: of the chain up to its end.
        tokens: its own, packed.
        place: where the pool has it.
        users: sequences that hold it.
    """

    key: bytes
    tokens: bytes
    place: int
    users: int = 1


class Blocks:
    """The blocks of a pool that can be found. Those that no sequence holds are kept until their
    room is needed. Not thread-safe: its pool has a lock.

    Attributes:
        version: of the weights that compute them, where they change while a model serves.

    Args:
        size: of a block, in positions.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.version = 0
        self._known: dict[bytes, Block] = {}
        # Without users, the least recently used first. A block comes before its predecessors in the
        # chain, without which it could not be found.
        self._kept: OrderedDict[Block, None] = OrderedDict()

    def along(self, token_ids: Sequence[int], salt: str) -> Iterator[Block]:
        """The blocks of a text's beginning, up to the first one that is not there. The last token
        is in none: it is computed for its row."""
        key = self._root(salt)
        for first in range(0, len(token_ids) - self.size, self.size):
            tokens = _packed(token_ids[first : first + self.size])
            key = _behind(key, tokens)
            block = self._known.get(key)
            if block is None or block.tokens != tokens:
                return
            yield block

    def add(
        self, before: Sequence[Block], token_ids: Sequence[int], salt: str, place: int
    ) -> tuple[Block, Block | None]:
        """Let a block be found. Another one of the same chain is not found any more.

        Args:
            before: the blocks of its chain before it.
            token_ids: of the block.
            salt: of the chain.
            place: see `Block`.

        Returns:
            The block, with one user; and the one that it replaces, if no sequence holds that.
        """
        tokens = _packed(token_ids)
        key = _behind(before[-1].key if before else self._root(salt), tokens)
        replaced = self._known.get(key)
        block = self._known[key] = Block(key, tokens, place)
        if replaced is None or replaced.users:
            return block, None
        del self._kept[replaced]
        return block, replaced

    def use(self, block: Block) -> None:
        """A further sequence holds a block."""
        block.users += 1
        self._kept.pop(block, None)

    def leave(self, block: Block) -> bool:
        """A sequence holds a block no more. A chain is left from its end.

        Returns:
            Whether its place is free: it has no users, and cannot be found.
        """
        block.users -= 1
        if block.users:
            return False
        if self._known.get(block.key) is not block:
            return True
        self._kept[block] = None
        return False

    def evict(self) -> Block:
        """Forget the kept block that was used longest ago; there is one."""
        block, _ = self._kept.popitem(last=False)
        del self._known[block.key]
        return block

    def forget(self) -> Sequence[Block]:
        """Let no block be found any more; those that no sequence holds."""
        kept = self.kept
        self._known.clear()
        self._kept.clear()
        return kept

    def _root(self, salt: str) -> bytes:
        version = self.version.to_bytes(8, "little")
        return blake2b(salt.encode(), digest_size=_KEY_BYTES, key=version, person=b"salt").digest()

    @property
    def kept(self) -> Sequence[Block]:
        """Those that no sequence holds, in the order in which they are forgotten."""
        return tuple(self._kept)

    @property
    def num_kept(self) -> int:
        """How many these are."""
        return len(self._kept)


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def _behind(key: bytes, tokens: bytes) -> bytes:
    return blake2b(key + tokens, digest_size=_KEY_BYTES).digest()
