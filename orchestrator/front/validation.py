"""What requests are checked against, and where their defaults come from."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from orchestrator.front.chat_template import ChatTemplate
from orchestrator.front.encoder import PromptEncoder
from orchestrator.sizes.goodput import sizes
from orchestrator.text.codec import TextCodec
from tandem.errors import InvalidRequest
from tandem.peers.replicas.compatibility import Capabilities, longest_text
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Generation, Request, Rule, Stopping
from tandem.rpc import messages
from tandem.rpc.log_probs import given_from
from tandem.shaping.grammar import Grammars
from tandem.speculation.request.log_probs import LogProbsWanted, misfit
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import MOST_BAD_WORD

MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING = 256
MAX_BAD_STRINGS = 64
MOST_MESSAGES = 4096
# Characters of a salt and of a key, for a cache of prefixes.
MOST_CACHE_NAME = 128
# So that no round's number is beyond what a span's attribute holds, a signed 64-bit integer.
MAX_FIRST_ROUND = 2**62
# The draft length of rules that need the same one each round, where none is given.
FIXED_GAMMA = 4
# New tokens that a drafter must be able to hold, for a text to begin with drafts.
_FEWEST_DRAFTED = 2


@dataclass(frozen=True)
class Validator:
    """The pair's limits and the orchestrator's defaults.

    Attributes:
        capabilities: of the pair.
        verifier: the default rule.
        gamma: the default draft length; None follows what it earns.
        nodes: the default number of a tree's tokens; None likewise.
        max_new_tokens: the default number of tokens.
        codec: the target's tokenizer.
        encoder: encodes with it.
        grammars: of texts that keep to one, over it.
        chat: the target's chat template; None if it has none.
        scoped_by_caller: whether texts of callers with different names share no computed prefix.
    """

    capabilities: Capabilities
    verifier: str
    gamma: int | None
    nodes: int | None
    max_new_tokens: int
    codec: TextCodec
    encoder: PromptEncoder
    grammars: Grammars
    chat: ChatTemplate | None = None
    scoped_by_caller: bool = True

    async def accept(
        self,
        request: Request,
        request_id: str,
        record: TextRecord,
        client: str,
    ) -> Generation:
        """A request, validated, with every default filled in.

        Args:
            request: what was asked.
            request_id: of it.
            record: books the time.
            client: whose it is, for fair shares of the encoder and the scope of its prefixes.

        Raises:
            InvalidRequest: a field is out of range; the sentence begins with its name.
            Exhausted: too many prompts are being encoded.
            DeadlineExceeded: the deadline passed before the prompt's turn to be encoded.
        """
        if request.first_round > MAX_FIRST_ROUND:
            raise InvalidRequest(f"first_round must be at most {MAX_FIRST_ROUND}")
        verifier, gamma = self._speculation(request)
        rule = self._rule(verifier, gamma)
        if request.first_round and rule.needs_every_draft:
            raise InvalidRequest(
                f"first_round: a {verifier} text cannot be resumed, since what its last rounds"
                " owe to the law is not in its tokens; start anew or use block; or, if none of its"
                " rounds drafted, give gamma 0"
            )
        self._check_stopping(request)
        cache_salt = self._cache_salt(request, client)
        with record.stage("tokenize"):
            prompt_ids = await self._prompt(request, client, record.remaining)
        nodes = self._nodes(request, gamma)
        choices = sizes(
            self.capabilities.largest.gamma, self.capabilities.largest.nodes, gamma, nodes
        )
        beside = 0 if gamma == 0 else self.capabilities.beside
        most = max(size.nodes for size in choices) + beside
        drafter = self.capabilities.drafter
        whole = self.capabilities.rules[verifier].needs_every_draft
        # A target of an older release drafts for texts alone that its drafter can hold.
        whole |= self.capabilities.by_target and drafter is not None and not drafter.cache_tokens
        max_new_tokens, held = self._max_new_tokens(
            request, len(prompt_ids), gamma, most, whole=whole
        )
        received_ids = self._received(request, max_new_tokens)
        sampling = await self._sampling(
            request, received_ids, client, record.remaining, max_new_tokens
        )
        if not held:
            gamma, nodes, rule, choices = 0, 0, self._rule(verifier, 0), sizes(0, 0, 0, 0)
            beside = 0
        options = self._options(request, verifier)
        stopping = Stopping(
            max_new_tokens,
            request.ignore_eos,
            tuple(request.stop_token_ids),
            tuple(request.stop_strings),
            sampling.shaping.min_tokens,
        )
        return Generation(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            stopping=stopping,
            verifier=verifier,
            rule=rule,
            gamma=gamma,
            nodes=nodes,
            sizes=choices,
            first_round=request.first_round,
            received_ids=tuple(received_ids),
            verifier_options=options if rule.name == verifier else {},
            log_probs=self._log_probs(request, len(prompt_ids)),
            beside=beside,
            waits_for_drafter=request.seeded and request.gamma is not None and gamma != 0,
            cache_salt=cache_salt,
            cache_key=request.cache_key,
            learn=request.learn,
            drafter_holds=held if 0 < held < len(prompt_ids) + max_new_tokens else None,
        )

    def _cache_salt(self, request: Request, client: str) -> str:
        """Of the caller and the request's salt, a hash, in which no two pairs are alike; empty
        where both are."""
        for name, given in (
            ("cache_salt", request.cache_salt),
            ("prompt_cache_key", request.cache_key),
        ):
            if len(given) > MOST_CACHE_NAME:
                raise InvalidRequest(
                    f"{name} may have {MOST_CACHE_NAME} characters, got {len(given)}"
                )
        scope = client if self.scoped_by_caller else ""
        if not scope and not request.cache_salt:
            return ""
        parts = (blake2b(part.encode()).digest() for part in (scope, request.cache_salt))
        return blake2b(b"".join(parts), digest_size=32).hexdigest()

    def _log_probs(self, request: Request, prompt_tokens: int) -> LogProbsWanted | None:
        wanted, target = request.log_probs, self.capabilities.target
        if wanted is None:
            return None
        if fault := misfit(wanted, given_from(target)):
            raise InvalidRequest(fault)
        if wanted.prompt and request.received_ids:
            raise InvalidRequest("log_probs.prompt: a text that is resumed has told them")
        if wanted.prompt and prompt_tokens * wanted.bytes_each > target.max_message_bytes:
            raise InvalidRequest(
                f"log_probs.prompt: those of {prompt_tokens} tokens do not fit into a message;"
                " ask for fewer likeliest tokens, or raise MAX_MESSAGE_MIB"
            )
        return wanted

    def _options(self, request: Request, verifier: str) -> dict[str, float]:
        """All options of a rule, as they are asked for."""
        known = self.capabilities.rules[verifier].options
        found = {name: default for name, (default, _, _) in known.items()}
        for name, value in request.verifier_options.items():
            if name not in known:
                has = f"has {list(known)}" if known else "has none"
                raise InvalidRequest(f"verifier_options: no {name!r}, {verifier} {has}")
            _, least, most = known[name]
            if not least <= value <= most:
                raise InvalidRequest(
                    f"verifier_options: {name} must be {least:g}..{most:g}, got {value:g}"
                )
            found[name] = value
        return found

    def _speculation(self, request: Request) -> tuple[str, int | None]:
        verifier = self.verifier if request.verifier is None else request.verifier
        if verifier not in self.capabilities.rules:
            raise InvalidRequest(
                f"verifier {verifier!r} is unknown to the target, or does not suit the drafter; use"
                f" one of {list(self.capabilities.rules)}"
                + ("; a lossy rule needs ALLOW_LOSSY=true" if verifier.startswith("lossy_") else "")
            )
        longest = self.capabilities.largest.gamma
        if request.gamma is not None:
            if request.gamma > longest:
                raise InvalidRequest(f"gamma must be 0..{longest}, got {request.gamma}")
            return verifier, request.gamma
        gamma = self.gamma
        if gamma is None and self.capabilities.rules[verifier].needs_every_draft:
            gamma = FIXED_GAMMA
        return verifier, (gamma if gamma is None and longest else min(gamma or 0, longest))

    def _nodes(self, request: Request, gamma: int | None) -> int | None:
        most = self.capabilities.largest.nodes
        if request.nodes is not None and not 1 <= request.nodes <= most:
            limits = f"1..{most}" if most else "unset, since drafts are chains here"
            raise InvalidRequest(f"max_nodes must be {limits}, got {request.nodes}")
        if gamma == 0 or not most:
            return 0
        if request.nodes is not None:
            return request.nodes
        return None if self.nodes is None else min(self.nodes, most)

    def _rule(self, verifier: str, gamma: int | None) -> Rule:
        """The rule that decides. Without drafts all are the same, and some refuse to go without."""
        rules = [self.capabilities.rules[verifier], *self.capabilities.rules.values()]
        suited = next((rule for rule in rules if gamma != 0 or not rule.needs_every_draft), None)
        if suited is None:
            raise InvalidRequest(f"gamma must be at least 1 for {list(self.capabilities.rules)}")
        return suited

    def _check_stopping(self, request: Request) -> None:
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise InvalidRequest("max_new_tokens must be at least 1")
        if len(request.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"stop_token_ids may hold {MAX_STOP_TOKENS} ids")
        vocab_size = self.capabilities.target.vocab_size
        if any(token >= vocab_size for token in request.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids must be below {vocab_size}")
        if len(request.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop_strings may hold {MAX_STOP_STRINGS} strings")
        if any(not 1 <= len(text) <= MAX_STOP_STRING for text in request.stop_strings):
            raise InvalidRequest(f"stop_strings must have 1..{MAX_STOP_STRING} characters each")
        if request.stop_strings and not self.codec.has_text:
            raise InvalidRequest("stop_strings need a target with a tokenizer; use stop_token_ids")

    async def _prompt(self, request: Request, client: str, remaining: float | None) -> list[int]:
        count, text = len(request.prompt_ids), request.prompt
        longest, vocab_size = (
            self.capabilities.target.max_length,
            self.capabilities.target.vocab_size,
        )
        if (text is not None) + bool(count) + bool(request.chat) != 1:
            raise InvalidRequest("prompt: give one of prompt, prompt_token_ids and chat")
        if request.chat:
            text = await self._rendered(request.chat, client, remaining)
            encoded = await self.encoder.encode(text, client, remaining, special=False)
            return messages.tokens_from("chat", encoded, vocab_size, max(len(encoded), 1))
        if count > longest:
            raise InvalidRequest(
                f"prompt_token_ids: a sequence may hold {longest} tokens, got {count}"
            )
        if text is None:
            return messages.tokens_from(
                "prompt_token_ids",
                request.prompt_ids,
                vocab_size,
                longest,
            )
        if not text:
            raise InvalidRequest("prompt must not be empty")
        self.check_text(text)
        encoded = await self.encoder.encode(text, client, remaining, special=request.special_tokens)
        limit = max(len(encoded), 1)  # with max_new_tokens it is held against the room below
        return messages.tokens_from("prompt", encoded, vocab_size, limit)

    async def _sampling(
        self,
        request: Request,
        received_ids: Sequence[int],
        client: str,
        remaining: float | None,
        max_new_tokens: int,
    ) -> Sampling:
        """The sampling, with the bad strings and what ends the text as ids; a grammar is tried."""
        shaping, target = request.sampling.shaping, self.capabilities.target
        if shaping.end_token_ids:
            raise InvalidRequest("sampling.shaping.end_token_ids must be left out")
        if not shaping and not request.bad_strings:
            return request.sampling
        if not target.shapes_logits:
            raise InvalidRequest("sampling.shaping: the target is of a version without it")
        if shaping.min_tokens > max_new_tokens:
            raise InvalidRequest(
                f"sampling.shaping.min_tokens must be at most max_new_tokens, {max_new_tokens}"
            )
        words = [*shaping.bad_words, *await self._bad_words(request, client, remaining)]
        eos = () if request.ignore_eos else target.eos_token_ids
        try:
            shaping = replace(
                shaping,
                bad_words=tuple(dict.fromkeys(words)),
                end_token_ids=tuple({*request.stop_token_ids, *eos}) if shaping.min_tokens else (),
            )
        except ValueError as error:
            raise InvalidRequest(f"sampling.shaping.{error}") from None
        for name, ids in (
            ("logit_bias", [token_id for token_id, _ in shaping.logit_bias]),
            ("bad_words", [token_id for word in shaping.bad_words for token_id in word]),
        ):
            if max(ids, default=0) >= target.vocab_size:
                raise InvalidRequest(
                    f"sampling.shaping.{name} holds id {max(ids)}, the vocabulary has"
                    f" {target.vocab_size} ids"
                )
        if (grammar := shaping.grammar) is not None:
            await self.encoder.run(
                lambda: self.grammars.check(grammar, received_ids), client, remaining
            )
        return replace(request.sampling, shaping=shaping)

    async def _bad_words(
        self, request: Request, client: str, remaining: float | None
    ) -> list[tuple[int, ...]]:
        """The bad strings as token ids: as each is, and after a space."""
        strings = list(request.bad_strings[: MAX_BAD_STRINGS + 1])
        if not strings:
            return []
        if len(strings) > MAX_BAD_STRINGS:
            raise InvalidRequest(f"bad_strings may hold {MAX_BAD_STRINGS} strings")
        if any(not 1 <= len(text) <= MAX_STOP_STRING for text in strings):
            raise InvalidRequest(f"bad_strings must have 1..{MAX_STOP_STRING} characters each")
        if not self.codec.has_text:
            raise InvalidRequest(
                "bad_strings need a target with a tokenizer; by gRPC, bad_words takes token ids"
            )

        def encoded() -> list[tuple[int, ...]]:
            spelled = [way for text in strings for way in (text, f" {text}")]
            words = [tuple(self.codec.encode(text, special=False)) for text in spelled]
            if (longest := max(map(len, words))) > MOST_BAD_WORD:
                raise InvalidRequest(
                    f"bad_strings may have {MOST_BAD_WORD} tokens each, with a space before them:"
                    f" one has {longest}"
                )
            return words

        return await self.encoder.run(encoded, client, remaining)

    async def _rendered(
        self, chat: Sequence[Mapping[str, str]], client: str, remaining: float | None
    ) -> str:
        """The prompt that the target's template makes of a chat."""
        if len(chat) > MOST_MESSAGES:
            raise InvalidRequest(f"chat.messages may hold {MOST_MESSAGES} messages")
        template = self.chat_template
        text = await self.encoder.run(lambda: template.render(chat), client, remaining)
        self.check_text(text, "chat")
        return text

    @property
    def chat_template(self) -> ChatTemplate:
        """The target's.

        Raises:
            InvalidRequest: it has none.
        """
        if self.chat is None:
            raise InvalidRequest(
                "chat: this target has no chat template; save one with its tokenizer"
                " (tokenizer.chat_template), or send a prompt"
            )
        return self.chat

    def check_text(self, text: str, field: str = "prompt") -> None:
        """Refuse a prompt that cannot be encoded, or not into a sequence.

        Args:
            text: of the prompt.
            field: that it comes from.

        Raises:
            InvalidRequest: there is no tokenizer, or the text is too long for a sequence.
        """
        if not self.codec.has_text:
            raise InvalidRequest(f"{field}: this target has no tokenizer; send token ids")
        longest = self.capabilities.target.max_length
        if len(text) > self.codec.longest_token * longest:
            raise InvalidRequest(
                f"{field}: {len(text)} characters cannot fit into {longest} tokens"
            )

    def _received(self, request: Request, most: int) -> list[int]:
        if not request.received_ids:
            return []
        if not request.first_round:
            raise InvalidRequest(
                "received_token_ids needs first_round: the number after the last round received"
            )
        vocab_size = self.capabilities.target.vocab_size
        return messages.tokens_from("received_token_ids", request.received_ids, vocab_size, most)

    def _max_new_tokens(
        self, request: Request, prompt_tokens: int, gamma: int | None, nodes: int, *, whole: bool
    ) -> tuple[int, int]:
        """The most new tokens; and the length up to which the text can be drafted, 0 if it is not
        drafted at all.

        What leaves gamma open and has no room beside drafts is decoded plainly. A text that
        outgrows its drafter is drafted as long as that can hold it, unless all of it has to be.
        """
        room = longest_text(self.capabilities.target, 0) - prompt_tokens
        drafted = drafter = longest_text(self.capabilities.target, nodes) - prompt_tokens
        if gamma != 0 and self.capabilities.drafter is not None:
            drafter = longest_text(self.capabilities.drafter, nodes) - prompt_tokens
        if whole or drafter < _FEWEST_DRAFTED:
            drafted = min(drafted, drafter)
        if request.gamma:
            room = drafted
        count = request.max_new_tokens
        if count is None:
            default = request.default_new_tokens or self.max_new_tokens
            count = min(max(default, request.sampling.shaping.min_tokens), max(room, 1))
        if count > room:
            raise InvalidRequest(
                f"max_new_tokens: {prompt_tokens} prompt tokens and {count} new ones"
                f" exceed the {room + prompt_tokens} tokens that a sequence may hold"
                + (" beside drafts; gamma 0 needs none" if request.gamma else "")
            )
        return count, prompt_tokens + min(drafter, count) if count <= drafted else 0


def new_seed() -> int:
    """The seed of a request that names none; the summary tells it."""
    return secrets.randbits(64)


def request_id_of(request: Request) -> str:
    """The request's id, or a new one.

    Raises:
        InvalidRequest: it cannot be an id.
    """
    messages.check_request_id(request.request_id)
    return request.request_id or uuid.uuid4().hex
