"""Feeds both texts to a back end in every way in which it is used, and compares what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import Unsupported
from tandem.inference.check.plain import Plain, Stage
from tandem.inference.check.steering import Steering
from tandem.inference.check.texts import TRUNK
from tandem.inference.compatibility import cannot_serve
from tandem.inference.feed import Feed
from tandem.inference.hidden_states import Layers
from tandem.inference.output import PassOutput

# At least as many tokens are fed.
SHORTEST = 12
# As many as the start feeds: rows enough that the largest of their differences is no chance; and,
# where caches have blocks, into the third of them.
SHORT, LONG = 24, 72


class Computes(Protocol):
    """Whatever computes passes, to be probed and timed.

    Attributes:
        of_layers: whose hidden states it gives.
        busy: held during a pass by a thread that serves.
        blocks: its layers, in order, to be compared one by one; empty if they cannot be.
    """

    of_layers: Layers
    busy: Any
    blocks: Sequence[nn.Module]

    @property
    def pool(self) -> Any:
        """Reserves room, and takes it back."""

    @property
    def vocab_size(self) -> int:
        """Ids that it takes."""

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `tandem.engine.scorer.Scorer`."""


@dataclass
class _Piece:
    """A part of the probe, and what it found.

    Attributes:
        name: for people.
        worst: largest excess by the name of a stage.
    """

    name: str
    worst: dict[str, float] = field(default_factory=dict)


@dataclass
class Comparison:
    """How a back end's rows differ from the plain ones.

    Attributes:
        plain: the model's own rows.
        pieces: parts of the probe.
    """

    plain: Plain
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether noise explains all differences."""
        return all(excess <= 1 for piece in self.pieces for excess in piece.worst.values())

    def __str__(self) -> str:
        """How far apart, against which noise, and where: for the sentence that refuses a model."""
        found = [(excess, name) for piece in self.pieces for name, excess in piece.worst.items()]
        # NaN, of a pass that left something out, is the worst.
        excess, worst = max(found, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
        allowed = self._allowed(worst)
        rows = [p.name for p in self.pieces if any(not one <= 1 for one in p.worst.values())]
        dtype = str(self.plain.logits.rows.dtype).removeprefix("torch.")
        return (
            f"{worst}{self._others(worst)} differs by {excess * allowed:.2g} of its size, where the"
            f" model's own rounding in {dtype} explains {allowed:.2g}; in rows {', '.join(rows)}"
        )

    def _others(self, worst: str) -> str:
        """How many other layers differ too, if one is the worst."""
        layers = {stage.name for stage in self.plain.layers} - {worst}
        wrong = {
            name for p in self.pieces for name, excess in p.worst.items() if not excess <= 1
        } & layers
        return (
            f" (and {len(wrong)} of {len(layers)} others)"
            if len(layers) < len(self.plain.layers)
            else ""
        )

    def _allowed(self, name: str) -> float:
        plain = self.plain
        stages = (*plain.layers, *plain.states, plain.logits)
        return next(stage for stage in stages if stage.name == name).tolerance


def require_agreement(model: PreTrainedModel, comparison: Comparison) -> None:
    """Refuse a model whose rows in a ragged batch differ from a plain pass.

    Raises:
        StartupError: the model is refused; names the architecture, the difference and its place.
    """
    if not comparison.holds:
        raise cannot_serve(model, f"a ragged batch differs from a plain pass: {comparison}")


def probe(backend: Computes, plain: Plain, length: int) -> Comparison:
    """Compare the rows of a text that is fed in pieces, beside another sequence, with a rollback.

    Args:
        backend: its pool has room for the text twice.
        plain: rows of the text.
        length: tokens to feed, at least `SHORTEST`.

    Raises:
        Unsupported: it does not compute the rows that are asked for.
    """
    fed = _Fed(backend, plain)
    text, wrong = plain.texts.first[:length], plain.texts.second
    pool, part = backend.pool, length // 12
    begun, more, most = (n * part for n in (3, 5, 9))
    other, cache = pool.reserve(length), pool.reserve(length)
    with fed.steering.attached() if fed.steering else nullcontext():
        fed.step("of a prompt", fed.rows(other, text[:begun], 0, logits=0))
        fed.step(
            "beside another sequence",
            fed.rows(cache, text[:more], 0),
            fed.rows(other, text[begun:more], begun, logits=1),
        )
        # A rejected draft. Its own rows are compared with nothing.
        fed.step("", fed.rows(cache, wrong[more : more + begun], more, known=False))
        cache.rollback(more)
        fed.step(
            "after a rollback",
            fed.rows(other, text[more : more + 1], more, logits=0),
            fed.rows(cache, text[more:most], more),
        )
        fed.step("alone", fed.rows(cache, text[most:-1], most))
        # May be computed by a different kernel.
        fed.step("of a single token", fed.rows(cache, text[-1:], length - 1))
    for reserved in (other, cache):
        pool.release(reserved)
    return fed.comparison


def probe_tree(backend: Computes, plain: Plain) -> Comparison:
    """Feed a small tree of both texts in two steps, beside another sequence, and keep its second
    path.

    Args:
        backend: its pool has room for `SHORTEST` tokens twice.
        plain: rows of the texts.

    Raises:
        Unsupported: it does not compute the rows that are asked for.
    """
    fed = _Fed(backend, plain)
    first, second = plain.texts.first, plain.texts.second
    behind = len(first)  # where the second text's places begin
    pool = backend.pool
    other, cache = pool.reserve(SHORTEST), pool.reserve(SHORTEST)
    end = TRUNK - 1
    with fed.steering.attached() if fed.steering else nullcontext():
        fed.step("of a prompt", fed.rows(cache, first[:end], 0, logits=0))
        fed.step(
            "of siblings",
            fed.nodes(
                cache,
                (first[end], first[TRUNK], second[TRUNK]),
                (end, TRUNK, behind + TRUNK),
                (0, 0),
            ),
            fed.rows(other, first[:2], 0, logits=0),
        )
        fed.step(
            "of siblings' children",
            fed.nodes(
                cache,
                (first[TRUNK + 1], second[TRUNK + 1]),
                (TRUNK + 1, behind + TRUNK + 1),
                (1, 2),
            ),
        )
        cache.keep((2, 4))
        fed.step(
            "after an accepted path",
            fed.rows(cache, second[TRUNK + 2 : TRUNK + 3], behind + TRUNK + 2),
            fed.rows(other, first[2:3], 2),
        )
    for reserved in (other, cache):
        pool.release(reserved)
    return fed.comparison


@dataclass(frozen=True, slots=True)
class _Rows:
    """A feed, and the places of its rows among those of both texts; -1 for none."""

    feed: Feed
    places: tuple[int, ...]


class _Fed:
    """Feeds rows whose plain ones are known.

    Args:
        backend: that computes them.
        plain: what they should be.
    """

    def __init__(self, backend: Computes, plain: Plain) -> None:
        self._backend, self._plain = backend, plain
        self.steering: Steering | None = None
        if backend.blocks and plain.layers:
            self.steering = Steering(backend.blocks, plain.given)
        self.comparison = Comparison(plain)

    def rows(
        self,
        cache: Any,
        tokens: Sequence[int],
        place: int,
        logits: int | None = None,
        known: bool = True,
    ) -> _Rows:
        """Tokens that continue a text, from a place on; rows of the last ones are wanted."""
        count = len(tokens)
        wanted = count if logits is None else logits
        states = wanted if self._backend.of_layers else 0
        places = tuple(range(place, place + count)) if known else (-1,) * count
        return _Rows(Feed(cache, tokens, wanted, states=states), places)

    def nodes(
        self, cache: Any, tokens: Sequence[int], places: tuple[int, ...], parents: tuple[int, ...]
    ) -> _Rows:
        """Tokens of a tree, whose rows are all wanted."""
        count = len(tokens)
        states = count if self._backend.of_layers else 0
        return _Rows(Feed(cache, tokens, count, parents, states), places)

    def step(self, name: str, *fed: _Rows) -> None:
        """Compute a batch, and compare its rows."""
        places = [place for rows in fed for place in rows.places]
        wanted = [
            place for rows in fed for place in rows.places[len(rows.places) - rows.feed.rows :]
        ]
        piece = _Piece(name)
        if self.steering:
            device = self._plain.given[0].device
            self.steering.begin(torch.tensor(places, device=device))
        output = self._backend.forward([rows.feed for rows in fed])
        if output.logits.shape[0] != len(wanted):
            raise Unsupported("it does not compute the logits of chosen rows alone")
        if self.steering:
            for stage, states in zip(self._plain.layers, self.steering.stages, strict=True):
                self._compare(piece, stage, places, states)
        self._compare(piece, self._plain.logits, wanted, output.logits)
        if output.states is not None:
            for stage, rows_of in zip(self._plain.states, output.states.unbind(1), strict=True):
                self._compare(piece, stage, wanted, rows_of)
        if piece.worst:
            self.comparison.pieces.append(piece)

    def _compare(self, piece: _Piece, stage: Stage, places: Sequence[int], found: Tensor) -> None:
        known = [row for row, place in enumerate(places) if place >= 0]
        if not known:
            return
        device = stage.rows.device
        rows = found.to(device).index_select(0, torch.tensor(known, device=device))
        at = torch.tensor([places[row] for row in known], device=device)
        piece.worst[stage.name] = float(stage.excess(at, rows).max())
