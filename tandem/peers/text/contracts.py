"""What a text needs of others: a drafter, a target, and a policy that chooses sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from tandem.errors import TandemError
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.request.log_probs import LogProbsWanted, TokenLogProb
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize, Tree
from tandem.telemetry.stages import StageTimes


@dataclass(frozen=True, slots=True)
class Prompt:
    """What opens a sequence on either service.

    Attributes:
        request_id: for logs and traces.
        token_ids: of the prompt and of all that was emitted before.
        sampling: with the seed.
        first_round: number of the target's first round.
        max_new_tokens: that may still be emitted.
        target_vocab_size: bounds every id, drafted or emitted.
        end_token_ids: after which no round is wanted any more.
        verifier_options: of the rule, by their names.
        emitted_tokens: how many of `token_ids` are not the prompt's.
        log_probs: that come with emitted tokens; None for none.
        cache_salt: prefixes are shared among sequences of an equal one.
        learn: whether a drafter that learns may keep the text.
        resumes: the text was given back and goes on with the round that was not decided, which
            follows `first_round`; see target.proto.
        in_full: the sequence must not be given back.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    first_round: int
    max_new_tokens: int
    target_vocab_size: int
    end_token_ids: Sequence[int] = ()
    verifier_options: Mapping[str, float] = field(default_factory=dict)
    emitted_tokens: int = 0
    log_probs: LogProbsWanted | None = None
    cache_salt: str = ""
    learn: bool = True
    resumes: bool = False
    in_full: bool = False

    @property
    def usual(self) -> bool:
        """Whether its opening takes as long as those of other prompts of its length: log
        probabilities of a prompt, and a grammar, take longer."""
        told = self.log_probs is not None and self.log_probs.prompt
        return not told and self.sampling.shaping.grammar is None


class AheadWay(IntEnum):
    """What a drafter does while the target verifies its draft.

    NOTHING: it waits.
    HELD: it prepares drafts, and holds them until it is asked.
    SENT: it sends them too, so that the next draft may be there before it is asked for.
    """

    NOTHING = 0
    HELD = 1
    SENT = 2


@dataclass(frozen=True, slots=True)
class RoundForecast:
    """What a round is expected to bring.

    Attributes:
        tokens: that it emits.
        wall_ns: from asking for the draft to the verdict.
    """

    tokens: float
    wall_ns: float

    @property
    def goodput(self) -> float:
        """Tokens a nanosecond."""
        return self.tokens / self.wall_ns


@dataclass(slots=True)  # each round has one, and a frozen one takes thrice as long to make
class SizeChoice:
    """A policy's word on a round.

    Attributes:
        size: of its draft.
        expected: of it; None where nothing is estimated.
        rounds: that may be asked for ahead, this one included, where the target does them by
            itself. What is chosen meanwhile waits for them.
        ahead: how drafts of this size are prepared while the target verifies this one.
    """

    size: DraftSize
    expected: RoundForecast | None = None
    rounds: int = 1
    ahead: AheadWay = AheadWay.NOTHING


@dataclass(slots=True)  # not frozen: see `SizeChoice`
class DraftReply:
    """A drafter's answer.

    Attributes:
        token_ids: drafted; may be none.
        parents: the place that each hangs at, 0 the first one and i + 1 after token i; None for
            a chain.
        payload: the draft with its distributions, for the target, unread.
        payload_bytes: size of the distributions.
        times: the drafter's.
        asked: the size that was asked for, where the target drafted: perhaps some rounds ago.
        ahead: how the next drafts were asked to be prepared after this one.
        prepared: what of it had been prepared; None where nothing was.
    """

    token_ids: Sequence[int]
    parents: Sequence[int] | None
    payload: Any
    payload_bytes: int
    times: StageTimes
    asked: DraftSize | None = None
    ahead: AheadWay = AheadWay.NOTHING
    prepared: PreparedOutcome | None = None

    @property
    def tree(self) -> Tree:
        """Where its tokens hang."""
        return Tree.of(self.parents, len(self.token_ids))

    @property
    def gamma(self) -> int:
        """Tokens of the longest path."""
        return len(self.token_ids) if self.parents is None else self.tree.depth

    def path_to(self, place: int) -> list[int]:
        """The tokens on the way to a place."""
        if self.parents is None:
            return list(self.token_ids[:place])
        return [self.token_ids[at - 1] for at in self.tree.path_to(place)]

    def kept_first(self, place: int) -> list[int]:
        """All tokens: those on the way to a place, then the others in their order."""
        on_path = self.tree.path_to(place)
        others = sorted({*range(1, len(self.token_ids) + 1)}.difference(on_path))
        return [self.token_ids[at - 1] for at in (*on_path, *others)]


@dataclass(slots=True)  # not frozen: see `SizeChoice`
class VerdictReply:
    """A target's answer.

    Attributes:
        place: of the last kept token; 0 where none was.
        num_accepted: drafted tokens kept.
        next_token: correction or bonus.
        overlaps: Σ min(p, q) of each drafted token.
        times: the target's.
        carry: the rule's state, for another target, unread.
        feedback: what the drafter wants to know of the round, unread; None where nothing came.
        dead_end: no token may come after the kept ones: `next_token` is none, and the text ends.
        log_probs: of each emitted token, where they are wanted.
        prompt_log_probs: the prompt's tokens with theirs, with the first verdict; the first token
            has none.
    """

    place: int
    num_accepted: int
    next_token: int
    overlaps: Sequence[float] = field(default_factory=tuple)
    times: StageTimes = field(default_factory=StageTimes)
    carry: Any = None
    feedback: Any = None
    dead_end: bool = False
    log_probs: Sequence[TokenLogProb] = ()
    prompt_log_probs: Sequence[tuple[int, TokenLogProb | None]] = ()


@dataclass(frozen=True, slots=True)
class News:
    """What a drafter has not been told of yet.

    Attributes:
        token_ids: emitted since its last draft.
        feedback: of the target since, see `VerdictReply`; oldest first.
    """

    token_ids: Sequence[int]
    feedback: Sequence[Any] = ()


class TextDrafter(Protocol):
    """A sequence on a drafter. Calls raise TandemError as it failed."""

    async def open(self, prompt: Prompt) -> StageTimes:
        """Prefill."""

    async def draft(
        self,
        round_: int,
        position: int,
        news: News,
        size: DraftSize,
        needs_every_draft: bool,
        ahead: AheadWay = AheadWay.NOTHING,
    ) -> DraftReply:
        """Move the sequence on and draft after it: gamma tokens, or fewer unless the rule
        `needs_every_draft`.

        Args:
            round_: number of the round.
            position: tokens that the sequence held after the last step.
            news: since then.
            size: of the draft.
            needs_every_draft: no fewer tokens will do.
            ahead: how the next drafts are prepared after this one.

        Raises:
            ShortDraft: there are fewer.
        """

    async def close(self) -> None:
        """End it in order."""

    def cancel(self) -> None:
        """Abort it. Never waits; harmless after the end."""


class TextTarget(Protocol):
    """A sequence on a target. Calls raise TandemError as it failed."""

    @property
    def resumes(self) -> bool:
        """Whether it can open a text between two rounds, see `Prompt`."""

    async def open(
        self, prompt: Prompt, verifier: str, size: DraftSize, carry: Any
    ) -> VerdictReply | None:
        """Prefill and draw the first token; none is drawn if a carry with levels continues a text,
        or the prompt `resumes` it.

        Args:
            prompt: the text so far.
            verifier: the rule's name.
            size: gamma of a rule with a fixed one, else 0; the most nodes of a draft, its probes
                included.
            carry: of the last verdict of another target; None at the start.
        """

    async def verify(self, round_: int, position: int, drafted: DraftReply | None) -> VerdictReply:
        """Have a draft decided; None decodes plainly."""

    def ask_rounds(self, round_: int, position: int, count: int, size: DraftSize) -> None:
        """Ask for rounds that the target does by itself, each of which `next_round` waits for.

        Args:
            round_: number of the first one; 0 for more of those that were asked for last.
            position: tokens of the text; 0 likewise.
            count: how many.
            size: of the drafts that it makes in them.
        """

    async def next_round(
        self, round_: int, position: int
    ) -> tuple[DraftReply | None, VerdictReply]:
        """The next of the rounds that were asked for: what the target drafted, and the verdict."""

    async def close(self) -> None:
        """End it in order."""

    def cancel(self) -> None:
        """Abort it. Never waits; harmless after the end."""


class TextPeers(Protocol):
    """Makes sequences for a text, at its start and in its middle."""

    async def target(self) -> TextTarget:
        """A fresh sequence on a target.

        Raises:
            Unavailable: there is none.
        """

    async def next_target(self, lost: TandemError) -> TextTarget:
        """A fresh sequence on another target, or on the last one where it is back.

        Args:
            lost: what the last one failed with.

        Raises:
            TandemError: that, where there is none, or not in time.
        """

    def drafter(self) -> TextDrafter | None:
        """A fresh sequence on a drafter; None where there is none."""


class SizePolicy(Protocol):
    """Chooses how much is drafted."""

    @property
    def begins_drafting(self) -> bool:
        """Whether a drafter is opened beside the target, or only once a draft is chosen."""

    def choose(self, left: int) -> SizeChoice:
        """The next draft's, with `left` >= 1 tokens still to emit."""

    def observe(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        """See what came of it."""

    def end(self) -> None:
        """The text has ended, perhaps in the middle of a round."""
