"""vLLM's paged KV cache as the engine reserves it: all of a sequence's blocks before it opens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tandem.errors import EngineFailure, Unsupported
from tandem.inference.kv.branches import NO_BRANCHES, Branches

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

# Rows are all that is asked of vLLM: it draws nothing.
_NOTHING = SamplingParams(temperature=0, max_tokens=1)


@dataclass(eq=False, slots=True)
class BlockCache:
    """One sequence's blocks.

    Attributes:
        name: for vLLM.
        capacity: positions.
        memory: that the blocks are of.
        request: by which vLLM's manager knows them.
        length: positions computed and kept.
        tokens: fed so far; those after `length` were rejected.
        known: whether the ranks have heard of the sequence.
        looked_up: see `tandem.inference.kv.extents.SequenceCache`, as for `found`.
    """

    name: str
    capacity: int
    memory: BlockMemory
    request: Request
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    known: bool = False
    branches: Branches = NO_BRANCHES
    looked_up: int = 0
    found: int = 0

    def rollback(self, length: int) -> None:
        """Forget all positions at or beyond `length`."""
        self.length = min(self.length, length)

    def adopt(self, token_ids: Sequence[int], salt: str | None) -> int:
        """See `tandem.inference.kv.extents.SequenceCache.adopt`."""
        if salt is not None and token_ids:
            self.looked_up = len(token_ids)
            self.found = self.memory.adopt(self, token_ids, salt)
        return self.found

    def publish(self, token_ids: Sequence[int], end: int) -> None:
        """See `tandem.inference.kv.extents.SequenceCache.publish`; of a prompt that was not looked
        for, nothing."""
        self.memory.share(self, min(end, self.length))

    def grow(self, token_ids: Sequence[int]) -> None:
        """Add a feed's tokens."""
        self.tokens[self.length :] = token_ids
        self.length += len(token_ids)


class BlockMemory:
    """The blocks of all sequences. Any thread may call it.

    A sequence has all of its blocks from the start, so that vLLM never has to preempt one. Blocks
    of prompts that begin alike are shared, if the prefix cache is on.

    Args:
        core: vLLM's.
    """

    def __init__(self, core: EngineCore) -> None:
        scheduler: Any = core.scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._hasher = core.request_block_hasher
        self._block: int = scheduler.block_size
        self._zeroes: bool = scheduler.needs_kv_cache_zeroing
        # A model with several kinds of layers takes blocks for each kind.
        kinds = self._manager.coordinator.single_type_managers
        self._blocks_each = sum(-(-self._block // kind.block_size) for kind in kinds)
        self._lock = threading.Lock()
        self._numbers = count()
        self._gone: set[str] = set()
        self._open, self._most = 0, core.vllm_config.scheduler_config.max_num_seqs
        self.positions = self.free_positions

    @property
    def kept_positions(self) -> int:
        """vLLM does not say how many of the free ones can be found."""
        return 0

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""
        free: int = self._pool.get_num_free_blocks() // self._blocks_each * self._block
        return free

    @property
    def longest_free(self) -> int:
        """Positions that one sequence could get: blocks are in any order."""
        return self.free_positions

    def reserve(self, capacity: int, nodes: int = 0) -> BlockCache | None:
        """See `tandem.engine.scorer.Memory`."""
        if nodes:
            raise Unsupported("vLLM computes chains, no trees: set MAX_NODES=0")
        name = str(next(self._numbers))
        request = Request(name, [0], _NOTHING, None)
        with self._lock:
            if self._open == self._most:
                return None
            if self._manager.allocate_slots(request, capacity, delay_cache_blocks=True) is None:
                return None
            self._open += 1
        return BlockCache(name, capacity, self, request)

    def release(self, cache: BlockCache) -> None:
        """See `tandem.engine.scorer.Memory`."""
        with self._lock:
            self._manager.free(cache.request)
            self._open -= 1
            if cache.known:
                self._gone.add(cache.name)

    def gone(self) -> set[str]:
        """Names of sequences that the ranks have yet to forget; told once."""
        with self._lock:
            gone, self._gone = self._gone, set()
            return gone

    def to_zero(self) -> list[int] | None:
        """Blocks that have to be zeroed before they are filled; told once. None where none has."""
        with self._lock:
            taken: list[int] = self._manager.take_new_block_ids()
        return taken if self._zeroes else None

    def blocks_of(self, cache: BlockCache) -> tuple[list[int], ...]:
        """Numbers of its blocks, for each kind of layer."""
        blocks: tuple[list[int], ...] = self._manager.get_block_ids(cache.name)
        return blocks

    def adopt(self, cache: BlockCache, token_ids: Sequence[int], salt: str) -> int:
        """Take over blocks that hold the beginning of a prompt, all but its last token at most.

        Returns:
            Positions that need not be computed.
        """
        if self._hasher is None or cache.known:
            return 0
        # Hashes the prompt, which takes a while.
        request = Request(
            cache.name,
            list(token_ids),
            _NOTHING,
            None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        with self._lock:
            self._manager.free(cache.request)
            found: int
            blocks, found, _ = self._manager.get_computed_blocks(request)
            # As many blocks as were just freed, or fewer: there is room.
            had = self._manager.allocate_slots(
                request,
                cache.capacity - found,
                num_new_computed_tokens=found,
                new_computed_blocks=blocks,
                delay_cache_blocks=True,
            )
            if had is None:
                raise EngineFailure("a sequence's blocks are gone")
            request.num_computed_tokens = found
        cache.request, cache.length, cache.tokens = request, found, list(token_ids[:found])
        return found

    def share(self, cache: BlockCache, kept: int) -> None:
        """Let others adopt the full blocks of a sequence's first positions."""
        request = cache.request
        shared = request.num_computed_tokens
        if request._block_hasher is None or kept // self._block <= shared // self._block:
            return
        with self._lock:
            if kept > request.num_tokens:
                request.append_output_token_ids(cache.tokens[request.num_tokens : kept])
            self._manager.cache_blocks(request, kept)
            request.num_computed_tokens = kept
