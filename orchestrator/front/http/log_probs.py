"""Log probabilities as the two calls of OpenAI's API have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tandem.speculation.request.log_probs import TokenLogProb

# A token with its log probability; the first token of a prompt has none.
Told = tuple[int, TokenLogProb | None]
# The bytes that a token stands for.
Spell = Callable[[int], bytes]

# JSON has no infinity; vLLM says this too.
_LEAST = -9999.0


def of_completion(tokens: Sequence[Told], spell: Spell, offset: int) -> dict[str, Any]:
    """As /v1/completions has them. A token that is not whole characters is `bytes:` and them.

    Args:
        tokens: of a text, or of a part of it.
        spell: see there.
        offset: characters of the tokens before.
    """
    texts = [_text(spell(token_id)) for token_id, _ in tokens]
    offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
    top: list[dict[str, float] | None] = []
    for text, (_, told) in zip(texts, tokens, strict=True):
        if told is None:
            top.append(None)
            continue
        likeliest = {_text(spell(other)): _finite(value) for other, value in reversed(told.top)}
        top.append({text: _finite(told.value), **dict(reversed(likeliest.items()))})
    return {
        "tokens": texts,
        "token_logprobs": [None if told is None else _finite(told.value) for _, told in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def of_chat(tokens: Sequence[Told], spell: Spell, offset: int) -> dict[str, Any]:
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
        for token_id, told in tokens
        if told is not None
    ]
    return {"content": content, "refusal": None}


def characters(tokens: Sequence[Told], spell: Spell) -> int:
    """How far tokens move the offset of those behind them."""
    return sum(len(_text(spell(token_id))) for token_id, _ in tokens)


def _text(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(value: float) -> float:
    return max(value, _LEAST)
