"""What is refused of a text's options, before a service is asked."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.client.errors import Refused
from tandem.client.options import generation_of

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("x", {"temperature": 0.5, "top_k": -1}, "top_k: -1 has the wrong type"),
    ("x", {"seed": 2**64}, "seed: 18446744073709551616 has"),
    ("x", {"max_new_tokens": "5"}, "max_new_tokens: '5' has"),
    ("x", {"stop": 7}, "stop: 7 has"),
    ("x", {"bad_words": [[1, -1]]}, r"bad_words: \[\[1, -1\]\] has"),
    ("x", {"log_probs": -1}, "log_probs: -1 has"),
    ("x", {"stop_token_ids": list(range(-1, 99))}, r"stop_token_ids: .{60} has"),
    ([5, -1], {"top_k": 3}, "prompt: "),
    ([{"role": "user"}, 5], {}, "prompt: a chat is a list of messages"),
    ("x", {"regex": "a", "grammar": "start: /a/"}, "regex: it and grammar exclude each other"),
    ("x", {"regex": "a", "choice": ["a"]}, "regex: it and choice exclude each other"),
]


@pytest.mark.parametrize(("prompt", "options", "sentence"), WRONG)
def test_the_option_is_named(prompt: Any, options: Any, sentence: str) -> None:
    with pytest.raises(Refused, match=f"^INVALID_ARGUMENT: {sentence}"):
        generation_of(prompt, options)


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        (b"x", {}, "prompt"),
        (bytearray(b"x"), {}, "prompt"),
        ([b"x"], {}, "prompt"),
        ("x", {"stop_token_ids": b"x"}, "stop_token_ids"),
        ("x", {"bad_words": ["a", b"x"]}, "bad_words"),
        ("x", {"choice": b"x"}, "choice"),
    ],
)
def test_bytes_are_no_token_ids(prompt: Any, options: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: bytes are neither"):
        generation_of(prompt, options)


def test_a_salt_and_a_key_of_the_cache_are_passed_on() -> None:
    asked = generation_of("x", {"cache_salt": "s", "prompt_cache_key": "k"})
    assert (asked.cache_salt, asked.prompt_cache_key) == ("s", "k")


@pytest.mark.parametrize("learn", [None, True, False])
def test_whether_a_text_may_be_kept_is_passed_on(learn: bool | None) -> None:
    asked = generation_of("x", {"learn": learn})
    assert asked.HasField("learn") == (learn is not None)
    assert asked.learn == bool(learn)
