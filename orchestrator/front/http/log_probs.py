"""Log probabilities as the two calls of OpenAI's API have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tandem.peers.text.values import Round
from tandem.speculation.request.log_probs import TokenLogProb

# The bytes that a token stands for.
Spell = Callable[[int], bytes]

# JSON has no infinity; vLLM says this too.
_LEAST = -9999.0


class Told(NamedTuple):
    """A token with its log probability.

    Attributes:
        token_id: in the target's vocabulary.
        log_prob: of it; the first token of a prompt has none.
        begin: where it begins, in characters of the choice's text.
    """

    token_id: int
    log_prob: TokenLogProb | None
    begin: int


class TextLogProbs:
    """Those of a text's tokens, as far as they are in the text that was sent.

    Args:
        prompt: where the prompt's tokens begin in the choice's text, if it begins with the prompt;
            None for one that is not in it.
        before: characters of the prompt in the choice's text.
        has_text: whether the target has a tokenizer. Without one all tokens are told.
    """

    def __init__(self, prompt: Sequence[int | None], before: int, *, has_text: bool) -> None:
        self._prompt, self._before, self._has_text = prompt, before, has_text
        self._waiting: deque[Told] = deque()

    def add(self, round_: Round) -> None:
        """Take a round's tokens, in the first one the prompt's before."""
        if told := round_.prompt_log_probs:
            begins = self._prompt if self._has_text else [0] * len(told)
            for (token_id, log_prob), begin in zip(told, begins, strict=True):
                if begin is not None:
                    self._waiting.append(Told(token_id, log_prob, begin))
        for token in round_.tokens:
            if token.begin is not None:
                begin = self._before + token.begin
                self._waiting.append(Told(token.id, token.log_prob, begin))

    def within(self, characters: int) -> list[Told]:
        """Tokens that begin within a number of characters of the choice's text, each told once."""
        found = []
        while self._waiting and (not self._has_text or self._waiting[0].begin < characters):
            found.append(self._waiting.popleft())
        return found


def of_completion(tokens: Sequence[Told], spell: Spell) -> dict[str, Any]:
    """As /v1/completions has them. A token that is not whole characters is `bytes:` and them."""
    texts = [_text(spell(token.token_id)) for token in tokens]
    top: list[dict[str, float] | None] = []
    for text, (_, told, _) in zip(texts, tokens, strict=True):
        if told is None:
            top.append(None)
            continue
        likeliest = {_text(spell(other)): _finite(value) for other, value in reversed(told.top)}
        top.append({text: _finite(told.value), **dict(reversed(likeliest.items()))})
    return {
        "tokens": texts,
        "token_logprobs": [None if told is None else _finite(told.value) for _, told, _ in tokens],
        "top_logprobs": top,
        "text_offset": [token.begin for token in tokens],
    }


def of_chat(tokens: Sequence[Told], spell: Spell) -> dict[str, Any]:
    """As /v1/chat/completions has them; see `of_completion`."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        spelled = spell(token_id)
        return {
            "token": spelled.decode(errors="replace"),
            "logprob": _finite(value),
            "bytes": list(spelled),
        }

    content = [
        {**entry(token_id, told.value), "top_logprobs": [entry(*other) for other in told.top]}
        for token_id, told, _ in tokens
        if told is not None
    ]
    return {"content": content, "refusal": None}


def _text(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(value: float) -> float:
    return max(value, _LEAST)
