"""A ragged batch, packed: the new tokens of many sequences in one row, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import Tiles
from tandem.inference.feed import Choice, DrawnToken, Feed, listed


@dataclass(slots=True)
class Packing:
    """Where the feeds of a batch go, on the host.

    Attributes:
        segments: one per sequence, in the order of the rows.
        positions: of each token in its own sequence.
        slots: of each token in the pool.
        rows: rows of the batch whose logits are wanted.
        states: rows whose hidden states are wanted.
    """

    segments: list[Segment]
    positions: list[int]
    slots: list[int]
    rows: list[int]
    states: list[int]

    @classmethod
    def of(cls, feeds: Sequence[Feed], fresh: bool = False) -> Packing:
        """Pack feeds of different sequences.

        Args:
            feeds: at least one.
            fresh: leaves out the tokens of which something is computed already; no rows are wanted.

        Raises:
            ValueError: a sequence would outgrow its extent; or a parent is no earlier row.
        """
        packing = cls([], [], [], [], [])
        first = 0
        for feed in feeds:
            cache, count = feed.cache, len(feed.token_ids)
            branches = None
            if feed.parents:
                trunk, branches = cache.branched(count, feed.parents)
                length = trunk + len(branches)
                if branches.in_line:
                    branches = None
            else:
                length = cache.length + count
            if length > cache.capacity:
                raise ValueError(f"{length} tokens do not fit an extent of {cache.capacity}")
            if fresh and feed.resumed is not None:
                count -= feed.resumed.count
            segment = Segment(
                first, count, cache.start, length, branches, cache.table, cache.skipped
            )
            packing.segments.append(segment)
            if branches is None:
                reach = segment.reach
                packing.positions.extend(range(reach - count, reach))
            else:
                packing.positions.extend(segment.behind[0][-count:].tolist())
            packing.slots.extend(cache.slots(length - count, count))
            first += count
            if not fresh:
                packing.rows.extend(range(first - feed.rows, first))
                packing.states.extend(range(first - feed.states, first))
        return packing

    def wanted(self, device: torch.device) -> Tensor | None:
        """`rows` on the device; None for all rows."""
        if len(self.rows) == len(self.positions):
            return None
        return torch.tensor(self.rows, dtype=torch.int64).to(device, non_blocking=True)

    def wanted_states(self, device: torch.device) -> Tensor | None:
        """`states` on the device; None for no rows."""
        if not self.states:
            return None
        return torch.tensor(self.states, dtype=torch.int64).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class ResumedBatch:
    """What is computed already of a batch, and the rest.

    Attributes:
        exit: lower layers, that some rows are through.
        rest: the other rows, which these layers have to compute.
        known: states of each segment's first rows after these layers, in parts.
    """

    exit: int
    rest: PackedBatch
    known: Sequence[Sequence[Tensor]]

    def joined(self, computed: Tensor) -> Tensor:
        """[T, width] of all rows, in the batch's order; `computed` are those of the rest."""
        parts: list[Tensor] = []
        for segment, known in zip(self.rest.segments, self.known, strict=True):
            parts += known
            parts.append(computed[segment.first : segment.first + segment.count])
        return torch.cat(parts)


@dataclass(slots=True)
class PackedBatch:
    """The input of a forward pass.

    Attributes:
        segments: one per sequence, in the order of the rows.
        token_ids: [1, T] int64.
        positions: [1, T] int64, of each token in its own sequence.
        slots: [T] int64, of each token in the pool.
        rows: [R] int64, rows of the batch whose logits are wanted; None for all.
        tiles: for attention in one call; None for one call per sequence.
        states: [S] int64, rows whose hidden states are wanted; None for none.
        resumed: what is computed of it already; None for nothing.
        choices: of sequences whose keys are looked at, with the sequence's number.
    """

    segments: list[Segment]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor | None
    tiles: Tiles | None = None
    states: Tensor | None = None
    resumed: ResumedBatch | None = None
    choices: Sequence[tuple[int, Choice]] = ()
    _masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)
    _branch_masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        feeds: Sequence[Feed],
        device: torch.device,
        in_one_call: bool = False,
        windows: Sequence[int | None] = (),
    ) -> PackedBatch:
        """Pack feeds of different sequences.

        Args:
            feeds: at least one.
            device: where its tensors go.
            in_one_call: whether attention takes all sequences at once.
            windows: of the model's layers, as far as they are known; for attention in one call.
        """
        batch = cls.packed(Packing.of(feeds), tokens_of(feeds, device), in_one_call, windows)
        batch.choices = [
            (i, feed.choice) for i, feed in enumerate(feeds) if feed.choice is not None
        ]
        exits = {feed.resumed.exit for feed in feeds if feed.resumed is not None}
        if exits:
            (exit_,) = exits  # one model's, of one recipe
            fresh = Packing.of(feeds, fresh=True)
            own = [n for seg, f in zip(batch.segments, feeds, strict=True) for n in _fresh(seg, f)]
            index = torch.tensor(own, dtype=torch.int64).to(device, non_blocking=True)
            rest = cls.packed(fresh, batch.token_ids[0][index], in_one_call, windows)
            known = [() if feed.resumed is None else feed.resumed.states for feed in feeds]
            batch.resumed = ResumedBatch(exit_, rest, known)
        return batch

    @classmethod
    def packed(
        cls,
        packing: Packing,
        token_ids: Tensor,
        in_one_call: bool,
        windows: Sequence[int | None],
    ) -> PackedBatch:
        """A batch of tokens [T], whose places are found."""
        segments, device = packing.segments, token_ids.device
        places = np.array([packing.positions, packing.slots])
        tiles = None
        if in_one_call:
            tiles = Tiles(segments, device, windows=windows, beside=places)
            numbers = tiles.beside.view(2, -1)
        else:
            numbers = torch.from_numpy(places).to(device, non_blocking=True)
        wanted, states = packing.wanted(device), packing.wanted_states(device)
        return cls(
            segments=segments,
            token_ids=token_ids[None],
            positions=numbers[:1],
            slots=numbers[1],
            rows=wanted,
            tiles=tiles,
            states=states,
        )

    def show(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Let keys of a layer be looked at.

        Args:
            layer: of the pool.
            query: [Hq, T, D] of the batch.
            keys: [H, positions, D], the pool's.
            values: [H, positions, Dv], the pool's.
        """
        for number, choice in self.choices:
            segment = self.segments[number]
            own = [part.narrow(1, segment.start, segment.length) for part in (keys, values)]
            choice.see(layer, query[:, segment.first], *own)

    def mask(
        self, count: int, seen: int, window: int | None, groups: int, like: Tensor
    ) -> Tensor | None:
        """An additive mask that hides what a sequence's new tokens must not see.

        Args:
            count: new tokens.
            seen: number of keys, the last of the sequence's positions.
            window: positions that a token sees, its own included; None for all.
            groups: query heads that share a key head; each token has a row for each.
            like: a tensor with the mask's dtype and device.

        Returns:
            [groups * count, seen] of 0 and -inf; None if nothing is hidden.
        """
        if count == 1 and (window is None or window >= seen):
            return None
        # Aligned at the end, masks of one count are equal: the longest one contains the others.
        key = (count, window, groups)
        mask = self._masks.get(key)
        if mask is None:
            longest = max(segment.length for segment in self.segments)
            queries = torch.arange(longest - count, longest, device=like.device)[:, None]
            keys = torch.arange(longest, device=like.device)
            hidden = (keys > queries) | (keys <= queries - (window or longest))
            mask = torch.zeros(count, longest, dtype=like.dtype, device=like.device)
            mask = self._masks[key] = mask.masked_fill(hidden, -torch.inf).repeat(groups, 1)
        part = mask[:, mask.shape[1] - seen :]
        # A device's kernels need an aligned mask.
        return part.contiguous() if part.is_cuda else part

    def branch_mask(
        self, segment: Segment, window: int | None, groups: int, like: Tensor
    ) -> Tensor:
        """The mask of a sequence with branches, whose windows are cut by position.

        Args:
            segment: its part of the batch.
            window: as for `mask`.
            groups: as for `mask`.
            like: as for `mask`.

        Returns:
            [groups * count, seen], for the last `seen` slots of the sequence.
        """
        key = (segment.first, window, groups)
        mask = self._branch_masks.get(key)
        if mask is None:
            positions, sees = segment.behind
            queries = positions[-segment.count :]
            trunk = segment.length - len(positions)
            first = 0
            if window is not None:
                sees &= positions > queries[:, None] - window
                first = min(trunk, max(0, int(queries.min()) - window + 1))
            trunk_sees = np.ones((segment.count, trunk - first), dtype=bool)
            if window is not None:
                trunk_sees &= np.arange(first, trunk) > queries[:, None] - window
            hidden = torch.from_numpy(~np.concatenate((trunk_sees, sees), 1))
            hidden = hidden.to(like.device, non_blocking=True)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            mask = self._branch_masks[key] = mask.masked_fill(hidden, -torch.inf).repeat(groups, 1)
        return mask


def _fresh(segment: Segment, feed: Feed) -> range:
    """Rows of a batch of which nothing is computed, of one feed."""
    known = 0 if feed.resumed is None else feed.resumed.count
    return range(segment.first + known, segment.first + segment.count)


@dataclass(slots=True)
class FedTokens:
    """The tokens of a batch: on the host as far as they are known there.

    Attributes:
        known: [T], 0 for drawn ones.
        slots: rows of the drawn ones.
        indices: these ones, among all that the steps drew.
        steps: what each step drew.
    """

    known: list[int]
    slots: list[int]
    indices: list[int]
    steps: list[Tensor]

    @classmethod
    def of(cls, feeds: Sequence[Feed]) -> FedTokens:
        """Those of all feeds, in order."""
        found = cls([], [], [], [])
        known, begins, count = found.known, dict[int, int](), 0
        for feed in feeds:
            token_ids = listed(feed.token_ids)
            # Drawn tokens are branch rows or a feed's last ones: a text is not looked through.
            if not (feed.parents or isinstance(token_ids[-1], DrawnToken)):
                known += cast("Sequence[int]", token_ids)
                continue
            for token_id in token_ids:
                if isinstance(token_id, DrawnToken):
                    tokens = token_id.draws.tokens
                    if id(tokens) not in begins:
                        begins[id(tokens)] = count
                        count += len(tokens)
                        found.steps.append(tokens)
                    found.slots.append(len(known))
                    found.indices.append(begins[id(tokens)] + token_id.index)
                    known.append(0)
                else:
                    known.append(token_id)
        return found

    @property
    def step(self) -> Tensor | None:
        """What one step drew, if that is all, in its order."""
        if len(self.steps) != 1 or self.indices != list(range(len(self.steps[0]))):
            return None
        return self.steps[0] if len(self.slots) == len(self.known) else None

    def fill(self, tokens: Tensor, slots: Tensor, indices: Tensor) -> None:
        """Put drawn tokens to their rows, on the device that they are on.

        Args:
            tokens: [T] of all rows.
            slots: `slots`, there.
            indices: `indices`, there.
        """
        there = self.steps[0] if len(self.steps) == 1 else torch.cat(self.steps)
        tokens.index_copy_(0, slots, there.index_select(0, indices))


def tokens_of(feeds: Sequence[Feed], device: torch.device) -> Tensor:
    """[T] token ids of all feeds; those on the host are sent in one transfer."""
    fed = FedTokens.of(feeds)
    if (step := fed.step) is not None:
        return step
    packed = torch.tensor(fed.known, dtype=torch.int64).to(device, non_blocking=True)
    if fed.steps:
        chosen = torch.tensor((fed.slots, fed.indices), dtype=torch.int64)
        fed.fill(packed, *chosen.to(device, non_blocking=True))
    return packed
