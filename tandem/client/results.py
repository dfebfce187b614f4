"""What comes of a text, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.orchestrator.v1 import orchestrator_pb2 as pb


def _name(value: int, kind: str) -> str:
    """A value of an enum, such as "accepted"."""
    enum = {"TOKEN_ORIGIN_": pb.TokenOrigin, "FINISH_REASON_": pb.FinishReason}[kind]
    return enum.Name(value).removeprefix(kind).lower()  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of a text, or of its prompt.

    Attributes:
        id: in the target's vocabulary.
        text: that it released; it may lag behind.
        origin: "accepted", "correction" or "bonus"; "" of a prompt.
        siblings: drafted beside it.
        log_prob: natural logarithm of its probability; None where it was not asked for.
        top: the likeliest tokens at its place with theirs.
    """

    id: int
    text: str = ""
    origin: str = ""
    siblings: int = 0
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GeneratedRound:
    """The tokens of one round.

    Attributes:
        number: of the round; 0 is the target's prefill.
        tokens: the accepted ones, then the correction or bonus.
        gamma: length of the draft, of a tree its longest path.
        nodes: tokens that were drafted.
        prompt: the prompt's tokens, in the first round, where their log probabilities were asked
            for.
    """

    number: int
    tokens: tuple[GeneratedToken, ...]
    gamma: int
    nodes: int
    prompt: tuple[GeneratedToken, ...] = ()

    @property
    def text(self) -> str:
        """That the round released."""
        return "".join(token.text for token in self.tokens)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were kept."""
        return sum(token.origin == "accepted" for token in self.tokens)


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A whole text. As a string it is its text.

    Attributes:
        rounds: of it.
        finish_reason: "eos", "stop_token", "stop_string", "length" or "dead_end".
        summary: counts, times and all settings that were in effect.
    """

    rounds: tuple[GeneratedRound, ...]
    finish_reason: str
    summary: pb.Summary = field(repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """Without the prompt; empty where the target has no tokenizer."""
        return "".join(round_.text for round_ in self.rounds) + self.summary.tail

    @property
    def tokens(self) -> tuple[GeneratedToken, ...]:
        """Of all rounds."""
        return tuple(token for round_ in self.rounds for token in round_.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Of all tokens."""
        return [token.id for token in self.tokens]

    @property
    def prompt(self) -> tuple[GeneratedToken, ...]:
        """The prompt's tokens, where their log probabilities were asked for."""
        return self.rounds[0].prompt if self.rounds else ()

    @property
    def seed(self) -> int:
        """Of all random numbers; where none was given and the text broke off, of its last part."""
        return self.summary.effective.sampling.seed

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were kept."""
        return self.summary.acceptance_rate


def round_of(message: pb.Round) -> GeneratedRound:
    """A round's message as a value."""
    tokens = (
        GeneratedToken(
            token.id,
            token.text,
            _name(token.origin, "TOKEN_ORIGIN_"),
            token.siblings,
            *_log_prob_of(token.log_prob),
        )
        for token in message.tokens
    )
    prompt = (
        GeneratedToken(one.id, "", "", 0, *_log_prob_of(one)) for one in message.prompt_log_probs
    )
    return GeneratedRound(message.round, tuple(tokens), message.gamma, message.nodes, tuple(prompt))


def _log_prob_of(message: pb.TokenLogProb) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    value = message.value if message.HasField("value") else None
    return value, tuple((top.id, top.value) for top in message.top)


def text_of(rounds: list[GeneratedRound], summary: pb.Summary) -> GeneratedText:
    """The whole of it."""
    return GeneratedText(tuple(rounds), _name(summary.finish_reason, "FINISH_REASON_"), summary)
