"""What a draft takes on the wire, and what its truncation loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.recorded_trees.methods import Drafted, proposal_of
from benchmarks.sweep.branching import Grown, Node
from benchmarks.sweep.support_size import DRAFT_MASS
from tandem.rpc.messages import draft_to
from tandem.speculation.categorical import Categorical
from tandem.speculation.draft import Draft

# The first one is the drafter's default.
SUPPORTS = (512, 384, 256)


@dataclass(frozen=True)
class Wire:
    """Means over rounds.

    Attributes:
        support: the most tokens of a row.
        bytes_a_round: of the message with the draft.
        overlap_lost: share of Σ min(p, q) over the draft's inner places.
    """

    support: int
    bytes_a_round: float
    overlap_lost: float

    @classmethod
    def mean(cls, wires: Sequence[Wire]) -> Wire:
        """Of several batches at one limit."""
        return cls(
            wires[0].support,
            float(np.mean([each.bytes_a_round for each in wires])),
            float(np.mean([each.overlap_lost for each in wires])),
        )


def wire_of(drafted: Drafted, nodes: Sequence[Node], grown: Grown, support: int) -> Wire:
    """Of drafts of one shape, one row a place: truncated as a drafter does with that limit."""
    branches = proposal_of(drafted, nodes, grown).branches
    assert branches is not None
    parents = branches.tree.parents[0].tolist()
    places = sorted(set(parents))
    firsts = [drafted.nodes[parents.index(place)] for place in places]
    behind = [nodes[node].place for node in firsts]
    q, p = grown.q[:, firsts], grown.p[:, behind]
    rows = Categorical.quantize(q.flatten(0, 1), DRAFT_MASS, support)
    sent = torch.zeros_like(q.flatten(0, 1)).scatter_(1, rows.ids, rows.weights.to(q.dtype))
    sent = (sent / sent.sum(1, keepdim=True)).view_as(q)
    lost = 1 - torch.minimum(p, sent).sum() / torch.minimum(p, q).sum()
    kept = (rows.weights > 0).view(len(q), len(places), -1).numpy()
    ids, weights = (part.view(kept.shape).numpy() for part in (rows.ids, rows.weights))
    sizes = []
    for i, tokens in enumerate(grown.tokens[:, list(drafted.nodes)].tolist()):
        draft = Draft(
            tokens,
            kept[i].sum(1).tolist(),
            ids[i][kept[i]].astype(np.uint32),
            weights[i][kept[i]].astype(np.uint16),
            parents,
            [places.index(place) for place in parents],
            True,
        )
        sizes.append(draft_to(draft).ByteSize())
    return Wire(support, float(np.mean(sizes)), float(lost))
