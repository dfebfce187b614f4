"""Verdicts of block and token verification on drafts, chains and trees, from a pass's rows.

No place gets a row as wide as the vocabulary: probabilities are computed from its law, for the few
tokens of a draft's rows, and at the last place for the draw of the next token. (The rules are
`block.py` and `traversal.py`, `token.py` and `recursive.py` of `tandem.verification`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.kernels import draws
from tandem.kernels.operators import register
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS

# Of a verdict: the place of the last kept node, next token, a number that is finite if all rows
# are. Then come the overlaps.
HEAD = 3
# Columns of what is asked of a text, float64: its first law, its nodes, whether siblings are
# distinct; then for N nodes N + 1 uniforms, as in `Verifier.verify`, and of each node its parent,
# its index in a walk that visits children before their parents, its row, its token.
FIRST, NODES, DISTINCT, UNIFORMS = range(4)
# Entries of rows, and nodes, for which there is a kernel each: few, since all are compiled at the
# start.
WIDTHS = 16, 64, 512, draws.WIDEST
# Ids whose weights are summed together.
_LANES = 8192


def decide(
    logits: Tensor, laws: Tensor, places: Tensor, asked: Tensor, rows: Tensor, rule: str
) -> Tensor:
    """Decide drafts by a rule.

    Args:
        logits: [*, V].
        laws: [P, LAW], of each place of each text, text by text.
        places: [P, DIGITS or more], what the laws were asked by.
        asked: [B, UNIFORMS + 1 + 5 N], see `asked_of`.
        rows: [Q, S + 2 K] int64, distributions as `draws.draw` has them. A draft ends before a node
            whose row has no weight.
        rule: "block" or "token".

    Returns:
        [B, HEAD + N] float64; where a draft has fewer nodes, the last ones are zeros.
    """
    found: Tensor = _decide(logits, laws, places, asked, rows, rule == "block")
    return found


def asked_of(
    firsts: Sequence[int],
    distinct: Sequence[bool],
    uniforms: npt.NDArray[np.float64],
    nodes: Sequence[Sequence[Sequence[int]]],
) -> npt.NDArray[np.float64]:
    """[B, UNIFORMS + 1 + 5 N] of texts with at most N nodes.

    Args:
        firsts: of each text, its first law.
        distinct: whether its siblings are.
        uniforms: [B, N + 1], as in `Verifier.verify`.
        nodes: of each text, of each of its nodes: parents, indices in the walk, rows (-1 for a
            certain one), tokens (-1 for the first one that was drawn from the row, -2 for the
            second).
    """
    texts, most = len(firsts), uniforms.shape[1] - 1
    asked = np.zeros((texts, UNIFORMS + 1 + 5 * most))
    asked[:, FIRST], asked[:, DISTINCT] = firsts, distinct
    asked[:, UNIFORMS : UNIFORMS + most + 1] = uniforms
    parts = asked[:, UNIFORMS + most + 1 :].reshape(texts, 4, most)
    for text, own in enumerate(nodes):
        count = asked[text, NODES] = len(own[0])
        parts[text, :, : int(count)] = [*own]
    return asked


def width_of(entries: int) -> int:
    """K, for the entries of a row and the nodes of a draft."""
    return next(width for width in WIDTHS if width >= entries)


def _nodes_of(asked: Tensor) -> int:
    """N, of what is asked."""
    return (asked.shape[1] - UNIFORMS - 1) // 5


def _decide_by_operators(
    logits: Tensor, laws: Tensor, places: Tensor, asked: Tensor, rows: Tensor, joint: bool
) -> Tensor:
    """See `decide`: the rules of `tandem.verification` themselves, text by text."""
    rule, most = VERIFIERS["block" if joint else "token"], _nodes_of(asked)
    probs = draws.processed(logits, places)
    numbers = torch.zeros(len(asked), HEAD + most, dtype=torch.float64)
    for own, out in zip(asked, numbers, strict=True):
        count, first = int(own[NODES]), int(own[FIRST])
        draft = _draft_of(own[UNIFORMS + most + 1 :].view(4, most)[:, :count], own, rows)
        p = probs[None, first : first + len(draft) + 1]
        proposal = Proposal.from_drafts([draft])
        uniforms = torch.cat((own[UNIFORMS : UNIFORMS + len(draft)], own[UNIFORMS + most, None]))
        verdict = rule.verify(proposal, p, uniforms[None])
        out[0], out[1] = verdict.place[0], verdict.next_token[0]
        out[2] = probs[first : first + count + 1, 0].sum()
        out[HEAD : HEAD + len(draft)] = proposal.overlaps(p)[0]
    return numbers


def _draft_of(nodes: Tensor, own: Tensor, rows: Tensor) -> Draft:
    """A text's draft, up to a node whose row has no weight."""
    parents, _, row_of, tokens = nodes.long().tolist()
    used = sorted(set(row_of) - {-1})
    width = _width_of(rows)
    entries = {row: rows[row, -2 * width :].view(2, width) for row in used}
    entries = {row: own[:, own[1] > 0] for row, own in entries.items()}
    end = next((i for i, row in enumerate(row_of) if row >= 0 and not entries[row].numel()), None)
    parents, row_of, tokens = parents[:end], row_of[:end], tokens[:end]
    token_ids = [
        int(rows[row, -1 - token]) if token < 0 else token
        for row, token in zip(row_of, tokens, strict=True)
    ]
    # A certain node has a row of its own.
    names = [row if row >= 0 else -1 - node for node, row in enumerate(row_of)]
    place_of = {name: place for place, name in enumerate(dict.fromkeys(names))}
    sent = [entries.get(name, rows.new_zeros(2, 0)) for name in place_of]
    ids, weights = torch.cat([*sent, rows.new_zeros(2, 0)], 1).numpy()
    return Draft(
        token_ids,
        [part.shape[1] for part in sent],
        ids.astype(np.uint32),
        weights.astype(np.uint16),
        parents,
        [place_of[name] for name in names],
        bool(own[DISTINCT]),
    )


def _width_of(rows: Tensor) -> int:
    """K, a power of two, of rows of S + 2 K numbers where S is less than K."""
    return 1 << ((rows.shape[1] // 2).bit_length() - 1)


def _decide_by_triton(
    logits: Tensor, laws: Tensor, places: Tensor, asked: Tensor, rows: Tensor, joint: bool
) -> Tensor:
    """See `decide`."""
    from tandem.kernels import triton_verdicts

    texts, size, most, width = len(asked), logits.shape[1], _nodes_of(asked), _width_of(rows)
    if most > width:
        raise ValueError(f"{most} nodes are more than the {width} entries of a row")
    numbers = asked.new_zeros(texts, HEAD + most)
    left = logits.new_full((texts, size), -1.0, dtype=torch.float32)
    shares = logits.new_empty(texts, dtype=torch.float32)
    triton_verdicts.judge[(texts,)](
        logits,
        laws,
        places,
        asked,
        rows,
        numbers,
        left,
        shares,
        logits.stride(0),
        asked.shape[1],
        places.shape[1],
        rows.shape[1],
        most,
        rows.shape[1] - 2 * width,
        size,
        K=width,
        JOINT=joint,
        num_warps=max(1, min(8, width // 64)),
    )
    parts = -(-size // _LANES)
    triton_verdicts.follow[(texts,)](
        logits,
        laws,
        places,
        asked,
        numbers,
        left,
        shares,
        logits.stride(0),
        asked.shape[1],
        places.shape[1],
        most,
        size,
        PARTS=max(2, 1 << (parts - 1).bit_length()),
        LANES=_LANES,
        num_warps=16,
    )
    return numbers


def _decide_shapes(
    logits: Tensor, laws: Tensor, places: Tensor, asked: Tensor, rows: Tensor, joint: bool
) -> Tensor:
    draws.require_one_device(logits, laws, places, asked, rows)
    return asked.new_empty(len(asked), HEAD + _nodes_of(asked))


_decide: Any = register(
    "decide(Tensor logits, Tensor laws, Tensor places, Tensor asked, Tensor rows, bool joint)"
    " -> Tensor",
    _decide_by_operators,
    _decide_by_triton,
    _decide_shapes,
)
