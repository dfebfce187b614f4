"""Text comes out whole: no half characters, nothing a stop string may still swallow."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orchestrator.text import TextCodec

# A byte-level vocabulary without merges: one token a byte.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    vocabulary = {character: i for i, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer.to_str().encode())


@pytest.mark.parametrize("text", ["plain", "größer → 🚀 done", "日本語", "e\u0301", "🏳️‍🌈!"])
def test_characters_that_span_tokens_come_whole(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    assert len(ids) == len(text.encode())
    stream = codec.stream(codec.encode("x"), [])
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_never_released(codec: TextCodec) -> None:
    stream = codec.stream([], [])
    pieces = [stream.push(token) for token in codec.encode("ok🚀")[:-1]]
    assert "".join(pieces) + stream.flush() == "ok"


def test_bytes_that_are_no_character_do_not_hold_the_text_up(codec: TextCodec) -> None:
    broken = codec.encode("é")[0]
    stream = codec.stream([], [])
    text = "".join(stream.push(token) for token in [broken, *codec.encode("abc")])
    assert text == "\ufffdabc"


def test_a_stop_string_that_spans_tokens_cuts_the_text(codec: TextCodec) -> None:
    stream = codec.stream([], ["\n\n", "END"])
    text = ""
    for token in codec.encode("one\ntwo EN three END four"):
        text += stream.push(token)
        assert "END" not in text
        if stream.stop_string:
            break
    assert text == "one\ntwo EN three "
    assert stream.stop_string == "END"


def test_the_first_stop_string_wins(codec: TextCodec) -> None:
    stream = codec.stream([], ["cd", "bcd"])
    text = "".join(stream.push(token) for token in codec.encode("abcd"))
    assert text == "a"
    assert stream.stop_string == "bcd"


def test_what_might_have_been_a_stop_string_is_released_in_the_end(codec: TextCodec) -> None:
    stream = codec.stream([], ["END"])
    text = "".join(stream.push(token) for token in codec.encode("the EN"))
    assert text == "the "
    assert text + stream.flush() == "the EN"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextCodec(b"").stream([1], [])
    assert stream.push(3) == ""
    assert stream.flush() == ""
