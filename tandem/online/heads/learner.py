"""A head in training: at each depth the target's row there, from a hidden state before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.distillation.divergences import TargetRows, discounted, loss, tvd
from tandem.distillation.held_out import rows_at_once
from tandem.inference.heads.head import Head
from tandem.inference.heads.parameters import HeadParameters
from tandem.online.heads.roots import Roots, roots_of
from tandem.online.kept_text import KeptText
from tandem.online.learner import HOME_TEXTS, LENGTH, Measured, WeightsInTraining

# Roots of a text in a step, and of a text that is measured on; both of a head that remembers the
# states before them.
_ROOTS, _MEASURED_ROOTS, _REMEMBERED_ROOTS = 128, 96, LENGTH
_DIVERGENCE = "tvd"
# By how many nats the row of a state, as it is kept, may be nearer to the tokens that came than the
# target's own row of that place, which is less rounded.
_ROUNDED = 0.02
# −log q of a token that a head does not know.
_UNKNOWN = 16.0


class HeadLearner(WeightsInTraining):
    """Weights of a head in training.

    A step's loss is Σ λ^(k - 1) ℓ_k over depths k (Medusa, arXiv 2401.10774, equation 1), where ℓ_k
    is the mean distance from the target's rows k places after the states, of the traffic and of
    home texts. Where a head guesses states, ℓ_k also has their smooth L1 distance from the target's
    (EAGLE, arXiv 2401.15077).

    Args:
        head: of the checkpoint's weights, float32, on the CPU.
        model: with the weights that are served.
        home: texts that it must not forget; the first half is learnt from, the other measured on.
            There may be none.
        rest: see `WeightsInTraining`.
    """

    def __init__(
        self,
        head: Head,
        model: HeadParameters,
        home: Sequence[KeptText],
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._head = head
        self._most, self._most_measured = _ROOTS, _MEASURED_ROOTS
        if head.remembers:
            self._most = self._most_measured = _REMEMBERED_ROOTS
        self._at_once = rows_at_once(self._most * head.learnt_depths, head.vocab_size)
        half = len(home) // 2
        self._home, self._home_held_out = home[:half], home[half:]
        super().__init__(model, head.trained(), rest)

    def _losses(self, texts: Sequence[KeptText], generator: Any) -> Iterator[Tensor]:
        """Parts of the mean over each depth's rows of the texts, and over those of home texts, each
        with its share; as many texts at once as memory is planned for."""
        chosen = generator.permutation(len(self._home))[:HOME_TEXTS]
        home = [self._home[number] for number in chosen]
        for own in filter(None, (texts, home)):
            parts = [self._roots(part, self._most, generator) for part in self._parts(own)]
            share = len(own) / (len(texts) + len(home))
            known = torch.stack([(each.rows >= 0).sum(0) for each in parts])
            counts = known.sum(0).clamp(min=1)
            for roots in parts:
                said = self._with_rest(roots)
                losses = [
                    self._distance(roots, said, *found).sum() / count
                    for found, count in zip(self._by_depth(self.model, roots), counts, strict=True)
                ]
                yield discounted(losses) * share
                self._rest()

    def _distance(
        self, roots: Roots, said: TargetRows, read: Tensor, logits: Tensor, rows: Tensor
    ) -> Tensor:
        """[r] the loss of each row of a depth: the distance from the target's row, and of a guessed
        state from the target's state there. The arguments are those of `_by_depth`."""
        found = loss(_DIVERGENCE, logits, _at(said, rows), roots.following[rows])
        if self._head.guesses_states:
            states = roots.states[rows, -1]
            found = found + F.smooth_l1_loss(read, states, reduction="none").mean(-1)
        return found

    def _parts(self, texts: Sequence[KeptText]) -> Iterator[Sequence[KeptText]]:
        for begin in range(0, len(texts), self._at_once):
            yield texts[begin : begin + self._at_once]

    def _roots(self, texts: Sequence[KeptText], most: int, generator: np.random.Generator) -> Roots:
        return roots_of(texts, self._head.vocab_size, most, self._head.learnt_depths, generator)

    def _by_depth(
        self, weights: HeadParameters, roots: Roots
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each depth, of the roots whose row is known: what the output matrix reads [r, width],
        the logits [r, V], and where these rows are [r]."""
        states = roots.states[roots.at]
        guesses = self._head.guesses(weights, states, roots.paths, roots.piece)
        for depth, own in enumerate(guesses, 1):
            rows = roots.rows[:, depth - 1]
            known = rows >= 0
            yield own[known], self._head.logits(own[known], depth), rows[known]

    def _with_rest(self, roots: Roots) -> TargetRows:
        """The target's rows; what they do not say is that of the states at their places. Where the
        head reads no last states, rows without a sum count as whole."""
        if not self._head.reads_last:
            return roots.told.said
        return roots.told.with_rest(lambda: self._of_states(roots))

    def _of_states(self, roots: Roots) -> Tensor:
        """[m, V] logits of the states at the rows' places: the target's own, but for rounding, with
        its output matrix."""
        return self._head.logits(roots.states[:, -1], 1)

    def measured(self, texts: Sequence[KeptText], *, served: bool = False) -> Measured:
        """See `WeightsInTraining`. The overlap is the share of a chain of all depths that is
        accepted: Σ_k Π_{j ≤ k} Σ min(p_j, q_j), over the depths whose rows are known. What is
        compared with the tokens that came is the better one of two rows: that of the first depth,
        and that of the state at the row's own place, where the head reads the last one.
        """
        return self._figures(self._served if served else self._mean, texts)

    @torch.no_grad()
    def _figures(self, weights: HeadParameters, texts: Sequence[KeptText]) -> Measured:
        shares: list[float] = []
        unsaid: list[tuple[float, float]] = []
        for part in self._parts(texts):
            roots = self._roots(part, self._most_measured, np.random.default_rng(0))
            said = self._with_rest(roots)
            # Where a row is not known a chain ends.
            overlaps = torch.zeros(roots.rows.shape)
            came = torch.full((len(roots.following), 2), _UNKNOWN)
            for depth, (_, logits, rows) in enumerate(self._by_depth(weights, roots)):
                known = roots.rows[:, depth] >= 0
                overlaps[known, depth] = 1 - tvd(*_at(said, rows).beside(logits))
                if not depth:
                    came[rows, 0] = _surprise(logits, roots.following[rows])
            if self._head.reads_last:
                came[:, 1] = _surprise(self._of_states(roots), roots.following) + _ROUNDED
            accepted = overlaps.cumprod(1).sum(1)
            depths = (roots.rows >= 0).cumprod(1).sum(1)
            surprise = roots.told.surprise(roots.following)
            for number in range(len(part)):
                here = roots.text == number
                rows = roots.rows[here, 0]
                rows = rows[rows >= 0]
                if len(rows):
                    shares.append(float(accepted[here].sum() / depths[here].sum()))
                    told = rows[surprise[rows].isfinite()]
                    better = (surprise[told, None] - came[told]).sum(0) / max(len(told), 1)
                    unsaid.append((float(better[0]), float(better[1])))
            self._rest()
        by_row = np.array(unsaid).reshape(-1, 2)
        return Measured(np.array(shares), by_row[:, by_row.sum(0).argmax()])

    def at_home(self) -> float:
        """By how many nats fewer tokens of a chain are accepted on home texts that are held out
        than with the first weights: −log of the ratio. 0 without home texts."""
        if not self._home_held_out:
            return 0.0
        first, own = (
            self._figures(weights, self._home_held_out).overlap.mean()
            for weights in (self._first, self._mean)
        )
        return float(np.log(first / own))


def _surprise(logits: Tensor, tokens: Tensor) -> Tensor:
    """[n] −log q of tokens [n], in nats; at most `_UNKNOWN`."""
    return F.cross_entropy(logits, tokens, reduction="none").clamp(max=_UNKNOWN)


def _at(said: TargetRows, rows: Tensor) -> TargetRows:
    assert said.ids is not None
    return TargetRows(said.log_probs[rows], said.ids[rows])
