"""What a caller may ask for, and the same with every default filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tandem.peers.text.contracts import RoundForecast
from tandem.peers.text.measures import TextCounts, TextTimes
from tandem.speculation.request.log_probs import LogProbsWanted, TokenLogProb
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize


@dataclass(frozen=True, slots=True)
class Request:
    """A text as it is asked for; None takes the default.

    Attributes:
        sampling: of the target, with a seed.
        prompt: as text; or
        prompt_ids: as token ids; or
        chat: messages with their role and content, for the target's template.
        request_id: for logs and traces.
        max_new_tokens: the most tokens to generate.
        default_new_tokens: the same where `max_new_tokens` is None; it is cut to the room that a
            sequence has. None takes the orchestrator's.
        ignore_eos: go on past end-of-text tokens.
        stop_token_ids: end the text like an end-of-text token.
        stop_strings: end the text where one first occurs.
        verifier: the rule's name.
        gamma: draft length; 0 decodes plainly.
        nodes: tokens of a draft that is a tree.
        first_round: number of the first round.
        received_ids: of a text that is resumed, what came of it.
        verifier_options: of the rule, by their names.
        special_tokens: whether the tokenizer adds its own to the prompt, a BOS for instance.
        bad_strings: that may not come.
        log_probs: that come with the tokens; None for none.
        seeded: whether the seed is the caller's.
        cache_salt: texts with another one share no computed prefix with this one.
        cache_key: texts with the same one prefer one replica.
        learn: whether drafters that learn may keep it.
    """

    sampling: Sampling
    prompt: str | None = None
    prompt_ids: Sequence[int] = ()
    request_id: str = ""
    max_new_tokens: int | None = None
    default_new_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    verifier: str | None = None
    gamma: int | None = None
    nodes: int | None = None
    first_round: int = 0
    received_ids: Sequence[int] = ()
    verifier_options: Mapping[str, float] = field(default_factory=dict)
    special_tokens: bool = True
    bad_strings: Sequence[str] = ()
    log_probs: LogProbsWanted | None = None
    chat: Sequence[Mapping[str, str]] = ()
    seeded: bool = False
    cache_salt: str = ""
    cache_key: str = ""
    learn: bool = True


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a text ends.

    Attributes:
        max_new_tokens: the most tokens to generate.
        ignore_eos: go on past end-of-text tokens.
        token_ids: end the text like an end-of-text token.
        strings: end the text where one first occurs.
        min_tokens: until this number was generated, only `max_new_tokens` ends it.
    """

    max_new_tokens: int
    ignore_eos: bool = False
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """A verifier as its targets describe it.

    Attributes:
        name: as requests name it.
        needs_every_draft: whether each of its drafts must be there, at full length, by a drafter
            that is pure; and no client can go on after what it received.
        options: that a request may set: of each the default, the least and the largest value.
    """

    name: str
    needs_every_draft: bool = False
    options: Mapping[str, tuple[float, float, float]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """A validated request with every default filled in.

    Attributes:
        request_id: for logs and traces.
        prompt_ids: the prompt.
        sampling: with the seed.
        stopping: when the text ends.
        verifier: the rule's name, as it was asked for.
        rule: that decides: the same, or a plain one without drafts.
        gamma: draft length; 0 decodes plainly, None follows what it earns.
        nodes: tokens of a draft that is a tree; 0 where drafts are chains, None as for gamma.
        sizes: that drafts may have: one where nothing is left open.
        first_round: number of the first round.
        received_ids: tokens of the text that the client has already.
        verifier_options: of the rule, by their names, all of them.
        log_probs: that come with the tokens; None for none.
        beside: nodes that the target holds beside those of `sizes`, for probes.
        waits_for_drafter: whether no round begins without a drafter, since the caller named a seed
            and a draft length, which repeat a text only so.
        cache_salt: of the caller's name and salt, as services get it; empty without both.
        cache_key: texts with the same one prefer one replica; empty for none.
        learn: whether drafters that learn may keep it.
        drafter_holds: length of the text, in tokens, up to which its drafter can hold it: then it
            goes on without drafts. None where that is all, or nothing is drafted.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    verifier: str
    rule: Rule
    gamma: int | None
    nodes: int | None
    sizes: tuple[DraftSize, ...]
    first_round: int = 0
    received_ids: tuple[int, ...] = ()
    verifier_options: Mapping[str, float] = field(default_factory=dict)
    log_probs: LogProbsWanted | None = None
    beside: int = 0
    waits_for_drafter: bool = False
    cache_salt: str = ""
    cache_key: str = ""
    learn: bool = True
    drafter_holds: int | None = None

    @property
    def most_nodes(self) -> int:
        """That the target holds beside the text."""
        return max(size.nodes for size in self.sizes) + self.beside

    @property
    def drafts(self) -> bool:
        """Whether any round may be drafted."""
        return self.gamma != 0


class Origin(Enum):
    """Where a token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(slots=True)  # not frozen: see `SizeChoice`
class EmittedToken:
    """A token.

    Attributes:
        id: in the target's vocabulary.
        origin: where it came from.
        text: that it released.
        siblings: that were drafted beside it.
        log_prob: where it was asked for.
        begin: where it begins, in characters of the text, which may end before; None for one that
            is no text, such as an end-of-text token.
    """

    id: int
    origin: Origin
    text: str
    siblings: int = 0
    log_prob: TokenLogProb | None = None
    begin: int | None = None


@dataclass(slots=True)  # not frozen: see `SizeChoice`
class Round:
    """The tokens of one round.

    Attributes:
        number: of the round.
        tokens: emitted.
        gamma: length of its draft, of a tree its longest path.
        nodes: tokens of its draft.
        expected: of it, where its size was chosen by that.
        prompt_log_probs: the prompt's tokens with theirs, in the first round; the first token has
            none.
    """

    number: int
    tokens: list[EmittedToken]
    gamma: int
    nodes: int
    expected: RoundForecast | None = None
    prompt_log_probs: Sequence[tuple[int, TokenLogProb | None]] = ()


class FinishReason(Enum):
    """Why a text ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEAD_END = "dead_end"


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a text.

    Attributes:
        generation: with every value that was in effect.
        finish_reason: why it ended.
        stop_string: that came, if one did.
        stop_token_id: of the request's, that came, if one did.
        counts: of the whole text.
        times: until its last round was with the client.
        drafter_lost: the drafter failed on the way.
        tail: text that no token released.
    """

    generation: Generation
    finish_reason: FinishReason
    stop_string: str
    counts: TextCounts
    times: TextTimes
    drafter_lost: bool
    tail: str = ""
    stop_token_id: int | None = None
