"""Drafts from look-ahead rows that the target computes after each place of the last draft.

Learned rows of a frozen target are PaSS (Monea et al., arXiv 2311.13581); a target that was tuned
with them is SPACE (Yi et al., arXiv 2402.11809), whose own sampling is not used, for it is not
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.drafting.drafter import Drafter, DraftSequence, Recipe, Setting, Traits
from tandem.engine.asks import DrawFrom, Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.errors import StartupError
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted, Row
from tandem.speculation.probes import Probes


class MasksDrafter(Drafter):
    """Draws from the rows of the group of probes after the place where the last draft ended.

    It is not pure: a row depends on where its group stands. In the first round, and after one
    without its probes, it drafts nothing and asks for them.

    Args:
        count: probes of a group, which are a chain; each names an extra embedding of its own.
        top: likeliest tokens of each row that are asked for.
        truncation: of the rows.
    """

    def __init__(self, count: int, top: int, truncation: Truncation) -> None:
        self._count = count
        wanted = FeedbackWanted(top=top, probes=count * (count + 1), probe_tokens=count)
        self.traits = Traits(feedback=wanted)
        self._truncation = truncation

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Keep the rows of the group that what was emitted has made the last one."""
        super().observe(sequence, emitted)
        rows, candidates, sequence.state = sequence.feedback.predicted, sequence.state or 0, 0
        if rows is not None:
            places = [at for at in rows if at > candidates]
            # A place whose row is not finite is left out, and ends the group before it.
            group = [at for number, at in enumerate(places) if at == places[0] + number]
            sequence.state = tuple(rows[at] for at in group[: self._count])

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """A token from each row, and probes after each of them."""
        rows: Sequence[Row] = sequence.state or ()
        drafted = Draft.certain(())
        if rows:
            drafted = yield DrawFrom(
                rows[: min(gamma, budget)],
                sequence.sampling,
                self._truncation,
                sequence.vocab_size,
                sequence.numbers,
                round_,
            )
        sequence.state = len(drafted)
        return replace(drafted, probes=self._groups(len(drafted), sequence.vocab_size))

    def _groups(self, candidates: int, vocab_size: int) -> Probes:
        """A chain of probes after place 0 and after each candidate."""
        token_ids: list[int] = []
        parents: list[int] = []
        for place in range(candidates + 1):
            for number in range(self._count):
                parents.append(candidates + len(token_ids) if number else place)
                token_ids.append(vocab_size + number)
        return Probes(tuple(token_ids), tuple(parents))


class MasksRecipe(Recipe):
    """The recipe of `masks`."""

    drafts: ClassVar = (
        "from look-ahead rows of the target (its extra embeddings); no model, but torch"
    )
    drafter: ClassVar = MasksDrafter

    method: Literal["masks"] = "masks"
    count: Annotated[
        int,
        Field(ge=1, le=15),
        Setting(
            "masks",
            "tokens to look ahead, and so extra embeddings of the target that are used; the target"
            " computes one row more than that for each place of a draft",
        ),
    ] = 4
    top: Annotated[
        int,
        Field(ge=2, le=256),
        Setting("masks_top", "how many of the likeliest tokens of each row the target sends"),
    ] = 64

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`.

        Raises:
            StartupError: torch is not installed.
        """
        if find_spec("torch") is None:
            raise StartupError(
                "the recipe masks draws tokens, for which torch is needed: install"
                " tandem[inference]"
            )
        import_module("tandem.engine.numbers.known_rows")  # or the first draft waits seconds for it
        return MasksDrafter(self.count, self.top, truncation)
