"""Drafts by a small decoder of the target's family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafter_svc.drafters.drafter import Drafter, DraftRequest, DraftSequence
from tandem.inference.cache import SequenceCache
from tandem.inference.decoder import Decoder
from tandem.speculation.distribution import process, quantize


@dataclass(eq=False)
class _State:
    """A KV cache and the tokens it holds: emitted ones, then drafted ones."""

    cache: SequenceCache
    held: list[int] = field(default_factory=list)


class ModelDrafter(Drafter):
    """Samples from a model's own processed, truncated distribution.

    Args:
        decoder: the small model.
        draft_mass: share of the distribution to keep.
        draft_support: the most tokens to keep; 0 keeps all.
    """

    name = "model"

    def __init__(self, decoder: Decoder, draft_mass: float, draft_support: int) -> None:
        self._decoder = decoder
        self._draft_mass = draft_mass
        self._draft_support = draft_support

    def open(self, sequence: DraftSequence) -> None:
        """Prefill."""
        sequence.state = _State(SequenceCache(sequence.capacity))
        self._feed(sequence.state, sequence.token_ids)

    def extend(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Keep what was drafted as it came out, roll the rest back. Computes nothing."""
        state: _State = sequence.state
        kept = len(sequence.token_ids)
        for token_id, held in zip(token_ids, state.held[kept:], strict=False):
            if token_id != held:
                break
            kept += 1
        # The last token is computed (again), if only for its logits.
        kept = min(kept, len(sequence.token_ids) + len(token_ids) - 1)
        state.cache.rollback(kept)
        del state.held[kept:]
        sequence.token_ids.extend(token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> None:
        """One forward pass and one draw for each request."""
        for request in requests:
            sequence, step = request.sequence, len(request.token_ids)
            state: _State = sequence.state
            wanted = sequence.token_ids + request.token_ids
            logits = self._feed(state, wanted[len(state.held) :])
            vocab_size = min(sequence.vocab_size, self._decoder.vocab_size)
            probs = process(logits[:, :vocab_size], sequence.sampling)[0]
            # A greedy row has a single token, whatever the support.
            support = 1 if sequence.sampling.greedy else self._draft_support
            row = quantize(probs, self._draft_mass, support)
            request.token_ids.append(row.draw(request.bits[step]))
            request.rows.append(row)

    def close(self, sequence: DraftSequence) -> None:
        """Drop the cache."""
        sequence.state = None

    def _feed(self, state: _State, token_ids: list[int]) -> Tensor:
        logits = self._decoder.forward(state.cache, token_ids, 1)
        state.held.extend(token_ids)
        return logits
