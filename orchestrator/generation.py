"""What is to be generated, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tandem.speculation.sampling import Sampling


class Origin(Enum):
    """Where a token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


class FinishReason(Enum):
    """Why a text ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a text ends.

    Attributes:
        max_new_tokens: the most tokens to generate.
        ignore_eos: go on past end-of-text tokens.
        token_ids: end the text like an end-of-text token.
        strings: end the text where one first occurs.
    """

    max_new_tokens: int
    ignore_eos: bool = False
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


# These rules modify the target's law for the positions that follow, where it takes a draft of the
# same drafter to make up for it: gamma stays fixed, no draft may be missing, and the tokens alone
# do not say how to go on. The handshake does not tell, so they are known here, by name.
_LAW_MODIFYING_VERIFIERS = frozenset({"greedy_block"})


def needs_every_draft(verifier: str, gamma: int) -> bool:
    """Whether a text of this rule depends on getting each of its drafts, at full length."""
    return gamma > 0 and verifier in _LAW_MODIFYING_VERIFIERS


@dataclass(frozen=True, slots=True)
class Generation:
    """A validated request with every default filled in.

    Attributes:
        request_id: for logs and traces.
        prompt_ids: the prompt.
        sampling: with the seed.
        stopping: when the text ends.
        verifier: the rule's name.
        gamma: draft length; 0 decodes plainly.
        first_round: number of the first round.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    verifier: str
    gamma: int
    first_round: int = 0

    @property
    def needs_every_draft(self) -> bool:
        """See the function."""
        return needs_every_draft(self.verifier, self.gamma)


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """A token, its origin, and the text it released."""

    id: int
    origin: Origin
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    """What one round emitted; `gamma` tokens had been drafted."""

    number: int
    tokens: list[EmittedToken]
    gamma: int


@dataclass(slots=True)
class Tally:
    """Counts of a generation, kept round by round.

    Attributes:
        new_tokens: emitted.
        gammas: each round's draft length, the prefill (0) first.
        accepted: each round's number of kept tokens.
        overlap_sum: Σ min(p, q) over drafted positions whose context was emitted.
        overlap_positions: how many those are.
        draft_bytes: size of the drafts' distributions.
        drafter_lost: the drafter failed on the way.
        busy_ns: what the services did meanwhile, by name.
        round_wall_ns: each drafted round, from asking for the draft to the verdict.
        round_model_ns: the two forward passes of those rounds.
    """

    new_tokens: int = 0
    gammas: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    overlap_sum: float = 0.0
    overlap_positions: int = 0
    draft_bytes: int = 0
    drafter_lost: bool = False
    busy_ns: dict[str, int] = field(default_factory=dict)
    round_wall_ns: list[int] = field(default_factory=list)
    round_model_ns: list[int] = field(default_factory=list)

    def add_round(self, gamma: int, accepted: int, overlaps: list[float]) -> None:
        """Count one round."""
        self.gammas.append(gamma)
        self.accepted.append(accepted)
        # Behind the first correction the drafted context was not emitted.
        seen = overlaps[: accepted + 1]
        self.overlap_sum += sum(seen)
        self.overlap_positions += len(seen)

    def add_busy(self, **nanoseconds: int) -> None:
        """Add what a service reported."""
        for name, value in nanoseconds.items():
            self.busy_ns[name] = self.busy_ns.get(name, 0) + value

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted."""
        return sum(self.gammas)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens kept."""
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 without a draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def block_efficiency(self) -> float:
        """Mean of accepted + 1 over drafted rounds; 0 without one."""
        drafted = [a + 1 for g, a in zip(self.gammas, self.accepted, strict=True) if g]
        return sum(drafted) / len(drafted) if drafted else 0.0

    @property
    def accepted_per_position(self) -> list[int]:
        """How often the token at each place of a draft was kept."""
        places = range(max(self.gammas, default=0))
        return [sum(a > place for a in self.accepted) for place in places]
