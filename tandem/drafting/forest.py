"""Trees of several small decoders at one root."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.drafting.branching import Growth
from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.drafting.tree import TreeDrafter
from tandem.engine.asks import DrawnTree, Steps, ToHost
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import DraftShape


class ForestDrafter(Drafter):
    """Each part draws a tree of its own behind the same text, one after the other.

    The first tokens of all parts are siblings, drawn without replacement: a part's row is without
    what the parts before it drew there. So no two trees meet, and behind each first token stand
    the rows of its own model. A sequence has a cache of every part, and its state is the parts'
    own sequences.

    Args:
        parts: trees; a chain is one without siblings.
        max_nodes: of a draft, which the parts share.
    """

    name = "forest"
    shape = DraftShape.TREE

    def __init__(self, parts: Sequence[TreeDrafter], max_nodes: int) -> None:
        self._parts = tuple(parts)
        self.max_nodes = max_nodes
        self._shares: dict[tuple[int, int], list[int]] = {}

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in, part by part."""
        sequence.state = []
        for part, cache in zip(self._parts, sequence.caches, strict=True):
            own = DraftSequence(
                list(sequence.token_ids), sequence.sampling, sequence.vocab_size, sequence.nodes
            )
            # A round's draws are numbered over all parts, so no two have one number.
            own.caches, own.numbers = [cache], sequence.numbers
            sequence.state.append(own)
            yield from part.open(own)

    def draft(
        self, sequence: DraftSequence, round_: int, gamma: int, max_nodes: int = 0
    ) -> Steps[Draft]:
        """Part by part; the tokens stay on the device until the end."""
        nodes = min(max_nodes or gamma, self.max_nodes)
        growth = Growth(nodes)
        for part, own, share in zip(
            self._parts, sequence.state, self._shared(gamma, nodes), strict=True
        ):
            if share:
                yield from part.grow(own, round_, gamma, share, growth)
        grown: DrawnTree = yield ToHost(growth.drawn, growth.places, distinct=True)
        for part, own in zip(self._parts, sequence.state, strict=True):
            part.hold(own, grown)
        return grown.draft

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Each part keeps what it has computed of the path that came out."""
        for part, own in zip(self._parts, sequence.state, strict=True):
            part.observe(own, emitted)
        sequence.token_ids.extend(emitted)

    def _shared(self, gamma: int, nodes: int) -> list[int]:
        """How many nodes each part draws: one each in turn, as long as it can use them."""
        if (gamma, nodes) not in self._shares:
            useful = [part.useful(gamma) for part in self._parts]
            shares = [0] * len(useful)
            while sum(shares) < min(nodes, sum(useful)):
                for i, most in enumerate(useful):
                    if shares[i] < most and sum(shares) < nodes:
                        shares[i] += 1
            self._shares[gamma, nodes] = shares
        return self._shares[gamma, nodes]
