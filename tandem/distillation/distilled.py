"""What came of a distillation, and what its drafter's README says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tandem.distillation.held_out import GAMMA, Figures
from tandem.distillation.plan import Distillation

_KINDS = {"text": "held-out text", "target": "the target's texts after held-out prompts"}


@dataclass(frozen=True, slots=True)
class Distilled:
    """What came of a run.

    Attributes:
        steps: of the optimiser.
        seconds: of training.
        best_step: after which the drafter was best.
        first: figures of the drafter that the run began with, by kind of text; see `HeldOut`.
        best: of the best drafter.
        tokens_a_round: of the first and the best, by temperature; see `HeldOut.tokens_a_round`.
    """

    steps: int
    seconds: float
    best_step: int
    first: Mapping[str, Figures]
    best: Mapping[str, Figures]
    tokens_a_round: Mapping[int, tuple[Sequence[float], Sequence[float]]]

    def rows(self) -> list[tuple[str, str, str]]:
        """A line of each figure: its name, before, after."""
        found = []
        for kind in self.best:
            name = _KINDS[kind]
            first, best = self.first[kind].summary(), self.best[kind].summary()
            for figure, words in (
                ("overlap", "α at temperature 1"),
                ("agreement", "α at temperature 0"),
            ):
                error = f"{figure}_error"
                found.append(
                    (
                        f"{words}, {name}",
                        f"{first[figure]:.3f} ± {first[error]:.3f}",
                        f"{best[figure]:.3f} ± {best[error]:.3f}",
                    )
                )
        for temperature, (before, after) in sorted(self.tokens_a_round.items(), reverse=True):
            if before and after:
                found.append(
                    (
                        f"tokens a round, {GAMMA} drafted, temperature {temperature}",
                        f"{fmean(before):.2f}",
                        f"{fmean(after):.2f}",
                    )
                )
        return found


def card_of(plan: Distillation, outcome: Distilled | None) -> str:
    """A drafter's README in Markdown.

    Args:
        plan: of the run.
        outcome: of the run; None while it goes on.
    """
    begun = plan.drafter or f"a fresh Llama of {plan.layers} layers x {plan.width}"
    lines = [
        "# A distilled drafter",
        "",
        f"It drafts for `{plan.target}`. `tandem distill` trained it on what that target says of"
        f" texts (DistillSpec, arXiv 2310.08461); it began as {begun}.",
        "",
        "| | |",
        "| --- | --- |",
        f"| divergence | {plan.divergence} |",
        f"| texts | {plan.data}, prompts of `{plan.prompts}` |",
        f"| a step | {plan.rows} texts of {plan.length} tokens, rate {plan.rate:g} |",
        f"| seed | {plan.seed} |",
    ]
    if outcome is None:
        return "\n".join([*lines, "", "The run goes on; this is its best drafter so far.", ""])
    tokens = outcome.steps * plan.rows * plan.length
    return "\n".join(
        [
            *lines,
            f"| training | {outcome.steps:,} steps, {tokens:,} tokens,"
            f" {outcome.seconds / 60:.1f} minutes; this is the drafter of step"
            f" {outcome.best_step:,} |",
            "",
            "| | before | after |",
            "| --- | --- | --- |",
            *(f"| {' | '.join(row)} |" for row in outcome.rows()),
            "",
            "α is the probability that a drafted token is accepted; errors are standard errors over"
            " texts. The best drafter was chosen by these texts too. A round's tokens are those of"
            " the rule `token`. Its licence is for its maker to say: it depends on those of the"
            " first drafter, the target and the texts.",
            "",
        ]
    )
