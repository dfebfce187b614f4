"""The files of a tokenizer, as a target hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenizerFiles:
    """What a target hands out of its checkpoint.

    Attributes:
        tokenizer_json: serialised; empty if there is none.
        chat_template: Jinja; empty if there is none.
        special_tokens: texts of tokens by the names that the template has for them.
    """

    tokenizer_json: bytes = b""
    chat_template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
