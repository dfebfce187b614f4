"""Tandem's rule in the place of vLLM's rejection sampling.

vLLM's rejection sampler stays: penalties, masks, temperature, top-k, top-p, bonus tokens and log
probabilities are its own. What it takes for the drafts' probabilities is a `DraftedRows` here, and
whether their tokens are kept is decided by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import Purpose, RandomNumbers, foresee, uniforms
from tandem.verification.verifier import Verifier

# What vLLM writes after a text's last token, and where it pads drafts.
NO_TOKEN = -1
# Of probabilities that are looked at together: 128 MiB, of which some copies are made. vLLM leaves
# memory free for a sampler, not for all rows of a batch at once.
_MOST_NUMBERS = 1 << 25


class TextNumbers:
    """A text's random numbers.

    Args:
        seed: 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self.accepting = RandomNumbers(seed, Purpose.ACCEPT, uniforms)
        self.following = RandomNumbers(seed, Purpose.RESIDUAL, uniforms)


@dataclass(frozen=True)
class DraftedRows:
    """The drafts of a pass.

    Attributes:
        rule: that decides them.
        counts: drafted places of each row of the batch, as vLLM computes them.
        drafts: of each row; empty where it has none, or where vLLM has padded a
            text that begins (`padded`).
        rounds: their numbers.
        numbers: of their texts; None where there is no draft.
    """

    rule: Verifier[Any]
    counts: Sequence[int]
    drafts: Sequence[Draft]
    rounds: Sequence[int]
    numbers: Sequence[TextNumbers | None]

    @property
    def padded(self) -> list[int]:
        """Rows whose drafted places hold nothing. vLLM pads a text that begins, or begins again,
        with all but one of its tokens in the cache."""
        pairs = enumerate(zip(self.counts, self.drafts, strict=True))
        return [row for row, (count, draft) in pairs if count and not len(draft)]

    def decide(self, logits: Tensor, bonus: Tensor, temperature: Tensor | None) -> Tensor:
        """The tokens that each text goes on with.

        Args:
            logits: [R, V], of the drafted places, after all that shapes them.
            bonus: [B, 1] int32 or int64, drawn after each whole draft.
            temperature: [B], by which the logits were divided; 0 takes the likeliest token. None
                where it is 0 in all rows.

        Returns:
            [B, N+1] int32, -1 after the last token; meaningless in rows that are `padded`.
        """
        counts = self.counts
        most, (_, vocab_size) = max(counts), logits.shape
        tokens = torch.full((len(counts), most + 1), NO_TOKEN, dtype=torch.int32)
        tokens = tokens.to(logits.device, non_blocking=True)
        tokens[:, 0] = bonus[:, 0]  # all that rows without a draft go on with
        starts = [0, *accumulate(counts)]
        drafted = [row for row, draft in enumerate(self.drafts) if len(draft)]
        each = max(_MOST_NUMBERS // ((most + 1) * vocab_size), 1)
        for start in range(0, len(drafted), each):
            rows = drafted[start : start + each]
            places = [place for row in rows for place in range(starts[row], starts[row + 1])]
            there = torch.tensor(rows).to(logits.device, non_blocking=True)
            hot = None if temperature is None else temperature[there] > 0
            own = logits[torch.tensor(places).to(logits.device, non_blocking=True)]
            tokens[there] = self._decided(rows, own, bonus[there], hot, most)
        return tokens

    def _decided(
        self, rows: Sequence[int], logits: Tensor, bonus: Tensor, hot: Tensor | None, most: int
    ) -> Tensor:
        """[B, N+1] of some rows, all of which have drafts.

        Args:
            rows: their places in the batch.
            logits: [R, V] of them.
            bonus: [B, 1].
            hot: [B], whether tokens are drawn; None where the likeliest one is taken everywhere.
            most: N.
        """
        device, (_, vocab_size) = logits.device, logits.shape
        drafts = [self.drafts[row] for row in rows]
        counts = torch.tensor([len(draft) for draft in drafts]).to(device, non_blocking=True)
        places = torch.arange(most + 1, device=device)
        probs = logits.new_zeros((len(rows), most + 1, vocab_size), dtype=torch.float32)
        probs[:, :most][places[:most] < counts[:, None]] = _probabilities(logits, hot, counts)
        # What follows a draft that is kept whole was drawn by vLLM.
        probs[torch.arange(len(rows), device=device), counts, bonus[:, 0].long()] = 1.0
        proposal = Proposal.from_drafts(drafts, device)
        behind = most - proposal.tokens.shape[1]
        verdict = self.rule.verify(
            proposal, probs[:, : most + 1 - behind], self._uniforms(rows).to(device)
        )
        tokens = torch.nn.functional.pad(proposal.tokens, (0, behind + 1))
        tokens = torch.where(places == verdict.place[:, None], verdict.next_token[:, None], tokens)
        return tokens.masked_fill(places > verdict.place[:, None], NO_TOKEN).int()

    def _uniforms(self, rows: Sequence[int]) -> Tensor:
        """[B, N+1]: column i decides token i, the last one draws the correction."""
        own = [(self.drafts[row], self.rounds[row], self.numbers[row]) for row in rows]
        wanted = [
            (numbers, round_, count)
            for draft, round_, of_text in own
            if of_text is not None
            for numbers, count in ((of_text.accepting, len(draft)), (of_text.following, 1))
            if not numbers.covers(round_, count)
        ]
        if wanted:
            foresee(wanted)
        most = max(len(draft) for draft, _, _ in own)
        values = np.zeros((len(own), most + 1))
        for row, (draft, round_, of_text) in enumerate(own):
            if of_text is not None:
                values[row, : len(draft)] = of_text.accepting.take(round_, len(draft))
                values[row, most] = of_text.following.take(round_, 1)[0]
        return torch.from_numpy(values)


def _probabilities(logits: Tensor, hot: Tensor | None, counts: Tensor) -> Tensor:
    """[R, V] float32; see `DraftedRows._decided`."""
    if hot is not None:
        probs = logits.softmax(-1, dtype=torch.float32)
        cold = ~hot.repeat_interleave(counts, output_size=len(logits))
    else:
        probs = torch.empty_like(logits, dtype=torch.float32)
        cold = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    probs.masked_fill_(cold[:, None], 0.0)
    likeliest = logits.argmax(-1, keepdim=True)
    return probs.scatter_add_(1, likeliest, cold[:, None].float())


def install() -> None:
    """Have vLLM's rejection sampler ask a `DraftedRows` where it is given one; once a process."""
    from vllm.v1.sample import rejection_sampler

    theirs = rejection_sampler.rejection_sample
    if getattr(theirs, "by_tandem", False):
        return

    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Any,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        **others: Any,
    ) -> Tensor:
        def decide_by_vllm(probs: Tensor | None) -> Tensor:
            return theirs(  # type: ignore[no-any-return]
                draft_token_ids,
                num_draft_tokens,
                max_spec_len,
                cu_num_draft_tokens,
                probs,
                target_logits,
                bonus_token_ids,
                sampling_metadata,
                **others,
            )

        if not isinstance(draft_probs, DraftedRows):
            return decide_by_vllm(draft_probs)
        cold = sampling_metadata.all_greedy
        found = draft_probs.decide(
            target_logits, bonus_token_ids, None if cold else sampling_metadata.temperature
        )
        if padded := draft_probs.padded:
            found[padded] = decide_by_vllm(None)[padded]
        return found

    rejection_sample.by_tandem = True  # type: ignore[attr-defined]
    rejection_sampler.rejection_sample = rejection_sample
