"""What the engine answers asks with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandem.inference.feed import DrawnToken
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Feedback, FeedbackWanted
from tandem.speculation.request.log_probs import TokenLogProb

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    from torch import Tensor

    from tandem.verification import Verifier


@dataclass(slots=True, eq=False)
class ReviewAnswer:
    """What a reviewer made of a draft, on the host.

    Attributes:
        kept: tokens of the draft that are kept.
        token_ids: these, and the one that the reviewer drew after them, if there was a row for it.
        rows: the reviewer's row of each: ids (uint32) and weights (uint16), none of them 0.
    """

    kept: int
    token_ids: list[int]
    rows: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]]


@dataclass(slots=True, eq=False)
class DrawnTree:
    """A tree on the host.

    Attributes:
        draft: of the draws that found a token. Where earlier siblings used up a row, nothing was
            drawn, nor after that.
        draws: which of the draws each node is.
    """

    draft: Draft
    draws: Sequence[int]


@dataclass(slots=True, eq=False)
class ScoredRows:
    """A job's rows of a pass.

    Attributes:
        logits: [R, V], of all jobs of the pass.
        first: the job's first row.
        count: its rows.
        states: [S, layers, width] of all jobs of the pass that asked for hidden states, or of the
            job alone; None where it asked for none.
        first_state: the job's first row of `states`.
        prompt_states: rows of the job's states before those of its logits.
    """

    logits: Tensor
    first: int
    count: int
    states: Tensor | None = None
    first_state: int = 0
    prompt_states: int = 0

    def at(self, row: int) -> ScoredRows:
        """One of the job's rows; without states."""
        return ScoredRows(self.logits, self.first + row, 1)

    def chosen(self, rows: Sequence[int]) -> ScoredRows:
        """Some of the job's rows, in another order; without states."""
        return ScoredRows(self.logits[[self.first + row for row in rows]], 0, len(rows))


@dataclass(slots=True, eq=False)
class DeviceFeedback:
    """What a job's verdict brings along for a drafter, on the device. Its hidden states are those
    of `Verdicts`.

    Attributes:
        wanted: what the drafter asked for.
        round: of the verdict.
        position: of the last token before the draft, in the text.
        prompt_states: positions before that one whose states come along.
        rows: [R, ...] each, what is told of each row, of all jobs of the step that want the same;
            none where only states are wanted.
        first: the job's first row of these.
    """

    wanted: FeedbackWanted
    round: int
    position: int
    prompt_states: int = 0
    rows: Sequence[Tensor] = ()
    first: int = 0


@dataclass(slots=True, eq=False)
class Verdicts:
    """What one step decided for jobs that share a rule, on the device.

    Attributes:
        rule: of them all.
        carries: the rule's state of each, on the device.
        numbers: [B, N] float64, which go to the host.
        carried: how many of the N, the last ones, are the rule's state.
        states: see `kept_states`; None where none are wanted.
        states_stay: whether `states` stay on the device.
    """

    rule: Verifier[Any]
    carries: Sequence[Any]
    numbers: Tensor
    carried: int
    states: Tensor | None = None
    states_stay: bool = False


@dataclass(slots=True, eq=False)
class DeviceVerdict:
    """A job's verdict: number `index` of those of its step. Its draft may be on the device too.

    Attributes:
        feedback: that comes with it; None for none.
    """

    verdicts: Verdicts
    index: int
    draft: Draft | Sequence[DrawnToken]
    feedback: DeviceFeedback | None = None


@dataclass(slots=True, eq=False)
class Decision:
    """A verdict on the host.

    Attributes:
        draft: that was judged. A chain that kernels drew on this device has token ids and no rows.
        place: of the last kept node; 0 where none was kept.
        next_token: the correction or bonus.
        overlaps: Σ min(p, q) of each node.
        carry: the rule's state, on the device.
        levels: the same as it travels.
        dead_end: no token may come after the place; `next_token` is none of the text's.
        log_probs: of each emitted token; none where they are not wanted.
        feedback: states of the prompt's end, of place 0 and of the kept path, and predictions;
            None where nothing is wanted.
    """

    draft: Draft
    place: int
    next_token: int
    overlaps: list[float]
    carry: Any = None
    levels: list[tuple[float, int]] = field(default_factory=list)
    dead_end: bool = False
    log_probs: Sequence[TokenLogProb] = ()
    feedback: Feedback | None = None

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that are kept: the place's depth."""
        return len(self.draft.path_to(self.place))

    @property
    def emitted(self) -> list[int]:
        """The kept path, and the token after it."""
        tokens = self.draft.emitted(self.place, self.next_token)
        return tokens[:-1] if self.dead_end else tokens
