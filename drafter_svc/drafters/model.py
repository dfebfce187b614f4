"""Drafts by a small decoder of the target's family."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter_svc.drafters.drafter import Drafter, DraftRequest, DraftSequence, PromptChunk
from tandem.inference.batch import Feed
from tandem.inference.decoder import Decoder
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import process


class ModelDrafter(Drafter):
    """Samples from a model's own processed, truncated distribution.

    A sequence's state is the tokens that its cache holds: emitted ones, then drafted ones.

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
        """Nothing is held yet."""
        sequence.state = []

    def extend(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Keep what was drafted as it came out, roll the rest back. Computes nothing."""
        held: list[int] = sequence.state
        kept = len(sequence.token_ids)
        for token_id, guess in zip(token_ids, held[kept:], strict=False):
            if token_id != guess:
                break
            kept += 1
        # The last token is computed (again), if only for its logits.
        kept = min(kept, len(sequence.token_ids) + len(token_ids) - 1)
        sequence.cache.rollback(kept)
        del held[kept:]
        sequence.token_ids.extend(token_ids)

    def propose(self, requests: Sequence[DraftRequest], chunks: Sequence[PromptChunk]) -> None:
        """One forward pass for all, and one draw for each request."""
        feeds = [Feed(request.sequence.cache, self._news(request), 1) for request in requests]
        feeds += [Feed(chunk.sequence.cache, chunk.token_ids, 0) for chunk in chunks]
        logits = self._decoder.forward(feeds)
        for chunk in chunks:
            chunk.sequence.state += chunk.token_ids
        if requests:
            self._draw(requests, logits)

    def _news(self, request: DraftRequest) -> Sequence[int] | Tensor:
        """What the model has not seen of a sequence: its news, then one drafted token a step."""
        if request.tokens:
            return request.tokens[-1]
        sequence = request.sequence
        news = sequence.token_ids[len(sequence.state) :]
        sequence.state += news
        return news

    def _draw(self, requests: Sequence[DraftRequest], logits: Tensor) -> None:
        samplings = [request.sequence.sampling for request in requests]
        logits = self._within_target(requests, logits)
        if all(sampling.greedy for sampling in samplings):
            rows = Categorical.argmax(logits)
            tokens = rows.ids[:, 0]
        else:
            probs = process(logits, samplings)
            rows = Categorical.quantize(probs, self._draft_mass, self._draft_support)
            bits = torch.cat([request.bits[len(request.tokens)] for request in requests])
            tokens = rows.draw(bits.to(rows.ids.device, non_blocking=True))
        drawn = zip(requests, tokens.chunk(len(requests)), rows.rows(), strict=True)
        for request, token, row in drawn:
            request.tokens.append(token)
            request.rows.append(row)
            if request.complete:
                # All but the last were fed; a rollback has to know them.
                request.sequence.state += torch.cat(request.tokens).tolist()[:-1]

    def _within_target(self, requests: Sequence[DraftRequest], logits: Tensor) -> Tensor:
        """Logits [B, V] without the ids that a request's target does not have."""
        vocab_size = logits.shape[1]
        sizes = [min(request.sequence.vocab_size, vocab_size) for request in requests]
        if max(sizes) < vocab_size:
            logits = logits[:, : max(sizes)]
        for row, size in enumerate(sizes):
            if size < logits.shape[1]:
                logits[row, size:] = -torch.inf
        return logits
