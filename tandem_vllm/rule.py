"""Tandem's rule in the place of vLLM's rejection sampling.

vLLM's rejection sampler stays: penalties, masks, temperature, top-k, top-p, bonus tokens and log
probabilities are its own. What it takes for the drafts' probabilities is a `DraftedRows` here, and
whether their tokens are kept is decided by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import Foreseen, Purpose, foresee, uniforms
from tandem.verification.verifier import Verifier

# What vLLM writes behind a text's last token.
_NO_TOKEN = -1


class TextNumbers:
    """A text's random numbers.

    Args:
        seed: 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self.accepting = Foreseen(seed, Purpose.ACCEPT, uniforms)
        self.following = Foreseen(seed, Purpose.RESIDUAL, uniforms)


@dataclass(frozen=True)
class DraftedRows:
    """The drafts of a pass.

    Attributes:
        rule: that decides them.
        drafts: of each row of the batch; empty where it has none.
        rounds: their numbers.
        numbers: of their texts; None where there is no draft.
    """

    rule: Verifier[Any]
    drafts: Sequence[Draft]
    rounds: Sequence[int]
    numbers: Sequence[TextNumbers | None]

    def decide(self, logits: Tensor, bonus: Tensor, temperature: Tensor | None) -> Tensor:
        """The tokens that each text goes on with.

        Args:
            logits: [R, V], of the drafted places, behind all that shapes them.
            bonus: [B, 1] int32 or int64, drawn behind each whole draft.
            temperature: [B], by which the logits were divided; 0 takes the likeliest token. None
                where it is 0 in all rows.

        Returns:
            [B, N+1] int32, -1 behind the last token.
        """
        device, (_, vocab_size) = logits.device, logits.shape
        counts = [len(draft) for draft in self.drafts]
        batch, most = len(counts), max(counts)
        lengths = torch.tensor(counts).to(device, non_blocking=True)
        places = torch.arange(most + 1, device=device)
        drafted = places[:most] < lengths[:, None]
        probs = logits.new_zeros((batch, most + 1, vocab_size), dtype=torch.float32)
        greedy = None if temperature is None else temperature == 0
        probs[:, :most][drafted] = self._probabilities(logits, greedy, counts)
        # What follows a draft that is kept whole was drawn by vLLM.
        ends = lengths[:, None, None].expand(-1, 1, vocab_size)
        own = torch.zeros_like(probs[:, :1]).scatter_(2, bonus.long()[:, None], 1.0)
        probs.scatter_(1, ends, own)
        proposal = Proposal.from_drafts(self.drafts, device)
        verdict = self.rule.verify(proposal, probs, self._uniforms(most).to(device))
        tokens = torch.nn.functional.pad(proposal.tokens, (0, 1))
        tokens = torch.where(places == verdict.place[:, None], verdict.next_token[:, None], tokens)
        return tokens.masked_fill(places > verdict.place[:, None], _NO_TOKEN).int()

    def _probabilities(
        self, logits: Tensor, greedy: Tensor | None, counts: Sequence[int]
    ) -> Tensor:
        """[R, V]."""
        likeliest = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[1])
        if greedy is None:
            return likeliest.float()
        of_row = greedy.repeat_interleave(torch.tensor(counts).to(greedy.device))
        return torch.where(of_row[:, None], likeliest, logits.softmax(-1, dtype=torch.float32))

    def _uniforms(self, most: int) -> Tensor:
        """[B, N+1]: column i decides token i, the last one draws the correction."""
        wanted = [
            (numbers, round_, count)
            for draft, round_, own in zip(self.drafts, self.rounds, self.numbers, strict=True)
            if own is not None
            for numbers, count in ((own.accepting, len(draft)), (own.following, 1))
            if not numbers.covers(round_, count)
        ]
        if wanted:
            foresee(wanted)
        values = np.zeros((len(self.drafts), most + 1))
        rows = zip(self.drafts, self.rounds, self.numbers, strict=True)
        for row, (draft, round_, own) in enumerate(rows):
            if own is not None:
                values[row, : len(draft)] = own.accepting.take(round_, len(draft))
                values[row, most] = own.following.take(round_, 1)[0]
        return torch.from_numpy(values)


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
        if not isinstance(draft_probs, DraftedRows):
            return theirs(  # type: ignore[no-any-return]
                draft_token_ids,
                num_draft_tokens,
                max_spec_len,
                cu_num_draft_tokens,
                draft_probs,
                target_logits,
                bonus_token_ids,
                sampling_metadata,
                **others,
            )
        greedy = sampling_metadata.all_greedy
        return draft_probs.decide(
            target_logits, bonus_token_ids, None if greedy else sampling_metadata.temperature
        )

    rejection_sample.by_tandem = True  # type: ignore[attr-defined]
    rejection_sampler.rejection_sample = rejection_sample
