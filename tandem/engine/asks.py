"""What a drafting method, or a target's round, asks of the engine that runs it.

A method is a generator: it yields asks and is sent the answers. The engine answers the pending
asks of all sequences together, in one packed pass a scorer, vectorised draws and decisions, and one
copy to the host; the tests answer them one by one. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.engine.answers import DeviceVerdict, ScoredRows
from tandem.engine.scorer import Scorer
from tandem.inference.feed import DrawnToken, Feed
from tandem.shaping.text import ShapedRows
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted, Row
from tandem.speculation.randomness import RandomNumbers, VerdictNumbers
from tandem.speculation.request.log_probs import LogProbsWanted
from tandem.speculation.request.sampling import Sampling

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from tandem.verification import Verifier

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Take:
    """Take a prompt in, chunk by chunk. The answer is `ScoredRows`, as of a `Score` of its end.

    Attributes:
        scorer: whose cache it goes to.
        feed: the prompt.
        taken: how many of its tokens are in.
        states: hidden states of the chunks so far, as far as they are wanted.
    """

    scorer: Scorer
    feed: Feed
    taken: int = 0
    states: list[Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens still to take in."""
        return len(self.feed.token_ids) - self.taken

    def chunk(self, count: int) -> Feed:
        """The next tokens, of this number; rows come with the last ones."""
        feed = self.feed
        assert not isinstance(feed.token_ids, DrawnToken)  # a prompt is known
        end = self.taken + count
        behind = len(feed.token_ids) - end  # tokens after the chunk
        return Feed(
            feed.cache,
            feed.token_ids[self.taken : end],
            0 if behind else feed.rows,
            states=min(count, max(0, feed.states - behind)),
        )


@dataclass(slots=True, eq=False)
class Score:
    """Compute the feed's tokens; the answer is `ScoredRows`."""

    scorer: Scorer
    feed: Feed


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a distribution is cut before it is drawn from and sent.

    Attributes:
        mass: share of it to keep.
        support: the most tokens to keep; 0 keeps all.
    """

    mass: float
    support: int


@dataclass(slots=True, eq=False)
class Draw:
    """Compute the feed's tokens and draw after each of its rows, shaped by the request's sampling,
    truncated and rounded; the answer is a list of `DrawnToken`, row by row. Where more are to
    `follow`, the answer may have several tokens of the chain, each drawn from the row of the one
    before; all but the last one are in the cache.

    Attributes:
        scorer: whose rows they are.
        feed: wants a row or more.
        sampling: of the request.
        truncation: of the method.
        vocab_size: ids at or beyond it are never drawn.
        numbers: the request's, with `digits` as their form.
        round: keys the numbers.
        node: keys the first number; the next draw has the next one. Less than `nodes`.
        nodes: that the round may draw.
        counts: draws of each group: those after one place; (1,) for a single one.
        rows: the feed's row that each group is drawn from; None for one group a row, in order.
            Groups of one row are drawn apart, and share the row when they are sent.
        shaped: what applies to the row of each group; None for nothing.
        distinct: draws of one group are without replacement. At temperature 0 they are the
            likeliest tokens, each certain.
        earlier: where distinct, draws that others made at the first group's place, without which
            its own are drawn too.
        confident: the model's own probabilities of greedy tokens are wanted; see `ReadTokens`.
        follow: tokens that will be drawn after this one, in a line, whatever it is; for one draw
            from one row that nothing shapes.
    """

    scorer: Scorer
    feed: Feed
    sampling: Sampling
    truncation: Truncation
    vocab_size: int
    numbers: RandomNumbers
    round: int
    node: int
    nodes: int
    counts: Sequence[int] = (1,)
    distinct: bool = False
    earlier: Sequence[DrawnToken] = ()
    rows: Sequence[int] | None = None
    shaped: ShapedRows | None = None
    confident: bool = False
    follow: int = 0


@dataclass(slots=True, eq=False)
class DrawTogether:
    """Answer several draws of one sequence by one pass; the answer is a list of theirs, in order.

    Attributes:
        scorer: of them all.
        feed: the tokens of their feeds, one after the other, on branches of one cache; all rows
            are wanted.
        draws: their feeds say which of their own last rows they draw after.
    """

    scorer: Scorer
    feed: Feed
    draws: Sequence[Draw]

    def firsts(self, first: int) -> list[int]:
        """Each draw's first row of a pass, where `first` is the feed's."""
        found = []
        for ask in self.draws:
            first += len(ask.feed.token_ids)
            found.append(first - ask.feed.rows)
        return found


@dataclass(slots=True, eq=False)
class Decide:
    """Have a rule decide a draft; the answer is `DeviceVerdict`.

    The drafted tokens of a path from place 0 on are *accepted*; its last place is the verdict's.
    One more token follows there: a *correction*, drawn from the rule's residual, where drafted
    tokens were rejected, or a *bonus*, drawn from the target's row, where none were.

    Attributes:
        rule: that decides, and takes such drafts.
        draft: may be empty; or a chain that is on the device, where `scored` is.
        scored: a row for the last emitted token, and one for each drafted one that is no twin.
            Those of probes are after them in the pass, and not counted.
        sampling: of the request.
        carry: the rule's state.
        numbers: of the request.
        round: keys the numbers.
        position: of the last emitted token in the text, from 0.
        feedback: that the verdict brings along; states only where `scored` has them. None for none.
        shaped: what applies to each row of `scored`; None for nothing.
    """

    rule: Verifier[Any]
    draft: Draft | Sequence[DrawnToken]
    scored: ScoredRows
    sampling: Sampling
    carry: Any
    numbers: VerdictNumbers
    round: int
    position: int = 0
    feedback: FeedbackWanted | None = None
    shaped: ShapedRows | None = None


@dataclass(slots=True, eq=False)
class DrawFrom:
    """Draw a token from each of several rows that are known, shaped by the request's sampling,
    truncated and rounded; the answer is a chain with the rows that were drawn from. Needs no pass:
    it is answered at once.

    Attributes:
        rows: the likeliest tokens of distributions, at least one.
        sampling: of the request; of its shaping nothing applies.
        truncation: of the method.
        vocab_size: ids at or beyond it are never drawn.
        numbers: the request's, with `digits` as their form.
        round: keys the numbers.
    """

    rows: Sequence[Row]
    sampling: Sampling
    truncation: Truncation
    vocab_size: int
    numbers: RandomNumbers
    round: int


@dataclass(slots=True, eq=False)
class Review:
    """Have a model decide a draft as a target does: by its own distributions, processed, truncated
    and rounded as a drafter's. The answer is `ReviewAnswer`.

    Attributes:
        scorer: that reviews.
        feed: tokens up to the draft, then the draft's, all in the trunk. Its rows are those of the
            draft's places; without the last place, nothing follows a draft that is kept whole.
        guess: the draft, a chain; may be empty.
        rule: name of a rule without state that takes chains.
        sampling: of the request.
        truncation: of the reviewer's rows.
        vocab_size: ids at or beyond it are never kept or drawn.
        uniforms: [len(guess) + 1]: one decides each token, the last draws what follows.
        leniency: by which acceptance probabilities are multiplied; with more than 1, what is kept
            does not follow the reviewer's rows.
        shaped: what applies to each row; None for nothing.
    """

    scorer: Scorer
    feed: Feed
    guess: Draft
    rule: str
    sampling: Sampling
    truncation: Truncation
    vocab_size: int
    uniforms: npt.NDArray[np.float64]
    leniency: float = 1.0
    shaped: ShapedRows | None = None


@dataclass(slots=True, eq=False)
class ReadTokens:
    """Learn what was drawn, to decide what to draw next; the answer is the tokens' ids.

    Attributes:
        drawn: the tokens.
        shares: the answer is each token's share of its row instead; of a greedy token whose `Draw`
            is `confident`, the model's own probability of it, since its row is all on it.
    """

    drawn: Sequence[DrawnToken]
    shares: bool = False


@dataclass(slots=True, eq=False)
class ReadLogProbs:
    """Learn what is told of tokens; the answer is a list of `TokenLogProb`.

    Attributes:
        scored: of this step.
        rows: of `scored`, one for each token: the one that it follows.
        token_ids: the tokens.
        wanted: what is told.
        sampling: makes the distribution that is told; None tells the model's own.
        shaped: what applies to the rows before; None for nothing.
    """

    scored: ScoredRows
    rows: Sequence[int]
    token_ids: Sequence[int]
    wanted: LogProbsWanted
    sampling: Sampling | None = None
    shaped: ShapedRows | None = None


@dataclass(slots=True, eq=False)
class ToHost:
    """Bring answers to the host: several `DrawnToken` as a `Draft`, a `DeviceVerdict` as a
    `Decision`.

    Attributes:
        answers: what to bring.
        places: that the draws hang at, which makes them a tree and the answer `DrawnTree`; None
            for a chain. That of a chain is a method's last ask, and the answer is its draft.
        distinct: siblings were drawn without replacement.
    """

    answers: Sequence[DrawnToken] | DeviceVerdict
    places: Sequence[int] | None = None
    distinct: bool = False


@dataclass(slots=True, eq=False)
class ToHostTogether:
    """Bring several drafts of one sequence to the host; the answer is a list, in order.

    Attributes:
        hosts: each as it would be asked for alone.
    """

    hosts: Sequence[ToHost]


@dataclass(slots=True, eq=False)
class Report:
    """Hand a result to the task that awaits the job, and go on; there is no answer.

    What comes after it is a step of its own: its times are counted from here.

    Attributes:
        result: for the task that awaits the job.
    """

    result: Any


@dataclass(slots=True, eq=False)
class Lap:
    """End a part of the job whose times are wanted apart; the answer is its `StageTimes`, complete
    at the next report.

    Attributes:
        step: what it was, such as "draft".
    """

    step: str


Ask = (
    Take
    | Score
    | Draw
    | DrawFrom
    | DrawTogether
    | Review
    | ReadTokens
    | ReadLogProbs
    | Decide
    | ToHost
    | ToHostTogether
    | Report
    | Lap
)
Steps = Generator[Ask, Any, T]
