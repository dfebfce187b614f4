"""Trees by a small decoder: siblings without replacement, one pass a level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.drafting.drafter import DraftSequence
from tandem.drafting.model import ModelDrafter, cache_of
from tandem.drafting.shape import TreeShape, likeliest
from tandem.engine.asks import Draw, Grown, Host, Scorer, Steps, Truncation
from tandem.inference.feed import Drawn, Feed
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import Shape


@dataclass(eq=False)
class _Held:
    """What a sequence's cache holds.

    Attributes:
        trunk: tokens.
        draft: the last one.
        rows: branch row of each of its nodes that was computed.
    """

    trunk: list[int]
    draft: Draft | None = None
    rows: dict[int, int] = field(default_factory=dict)


class TreeDrafter(ModelDrafter):
    """Draws the tree that is likeliest to be kept, whatever its tokens turn out to be.

    Siblings are drawn without replacement (Sequoia, arXiv 2402.12374). Leaves are drawn and never
    computed, so a draft takes as many passes as it is deep. At temperature 0 siblings are the
    likeliest tokens, each certain.

    Args:
        scorer: the small model.
        truncation: of its distributions.
        acceptance: by sibling rank, from which the shape follows.
        max_nodes: of a draft.
    """

    name = "tree"
    shape = Shape.TREE

    def __init__(
        self,
        scorer: Scorer,
        truncation: Truncation,
        acceptance: Sequence[float],
        max_nodes: int,
    ) -> None:
        super().__init__(scorer, truncation)
        self._acceptance = tuple(acceptance)
        self.max_nodes = max_nodes
        self._shapes: dict[tuple[int, int], TreeShape] = {}

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in."""
        yield from super().open(sequence)
        sequence.state = _Held(sequence.state)

    def draft(
        self, sequence: DraftSequence, round_: int, gamma: int, max_nodes: int = 0
    ) -> Steps[Draft]:
        """Level by level; the tokens stay on the device until the end."""
        held: _Held = sequence.state
        news = sequence.token_ids[len(held.trunk) :]
        held.trunk += news
        shape = self._shape(gamma, min(max_nodes or gamma, self.max_nodes))
        feed = Feed(cache_of(sequence), self._known(news), 1)
        drawn: list[Drawn] = []
        places: list[int] = []
        rows: dict[int, int] = {}  # branch row of each place that was computed
        behind = [0]  # the places whose rows the feed gives
        for depth, level in enumerate(shape.levels):
            counts = list(shape.counts(depth).values())
            first = len(drawn)
            drawn += yield Draw(
                self._scorer,
                feed,
                sequence.sampling,
                self._truncation,
                sequence.vocab_size,
                sequence.numbers,
                round_,
                first,
                len(shape),
                counts,
                distinct=True,
            )
            places += [
                place for place, count in zip(behind, counts, strict=True) for _ in range(count)
            ]
            if depth + 1 < len(shape.levels):
                inner = [first + number for number in shape.counts(depth + 1)]
                parents = [rows[places[node]] if places[node] else 0 for node in inner]
                behind = [node + 1 for node in inner]
                rows |= {place: len(rows) + i for i, place in enumerate(behind, 1)}
                feed = Feed(
                    cache_of(sequence), [drawn[node] for node in inner], len(inner), parents
                )
            assert len(level) == sum(counts)
        grown: Grown = yield Host(drawn, places, distinct=True)
        held.draft = grown.draft
        held.rows = {
            node: rows[draw + 1] for node, draw in enumerate(grown.draws) if draw + 1 in rows
        }
        return grown.draft

    def _shape(self, gamma: int, nodes: int) -> TreeShape:
        if (gamma, nodes) not in self._shapes:
            self._shapes[gamma, nodes] = likeliest(self._acceptance, gamma, nodes)
        return self._shapes[gamma, nodes]

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Keep the path that came out, as far as it was computed. Computes nothing."""
        held: _Held = sequence.state
        kept = [] if held.draft is None else _path(held.draft, held.rows, emitted[:-1])
        cache_of(sequence).keep([held.rows[node] for node in kept])
        held.trunk += emitted[: len(kept)]
        held.draft, held.rows = None, {}
        sequence.token_ids.extend(emitted)


def _path(draft: Draft, rows: dict[int, int], emitted: Sequence[int]) -> list[int]:
    """The computed nodes on the way of emitted tokens."""
    children: dict[tuple[int, int], int] = {}
    for node, (place, token_id) in enumerate(zip(draft.places(), draft.token_ids, strict=True)):
        children.setdefault((place, token_id), node)
    path: list[int] = []
    for token_id in emitted:
        node = children.get((path[-1] + 1 if path else 0, token_id), -1)
        if node not in rows:
            break
        path.append(node)
    return path
