"""Text comes out whole: no half characters, nothing that a stop string may still cut off."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from orchestrator.text.codec import TextCodec
from tandem.errors import StartupError

# A byte-level vocabulary without merges: one token a byte.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    vocabulary = {character: i for i, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: ASCII characters are tokens, all others are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(0x21, 0x7F)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def either(request: pytest.FixtureRequest) -> TextCodec:
    tokenizer = request.param()
    tokenizer.add_special_tokens([SPECIAL])
    return TextCodec(tokenizer.to_str().encode())


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(byte_level().to_str().encode())


# Its end is a U+FFFD that was meant; between the emojis no token is text of its own.
HARD = "größer → 🚀🚀🚀🚀🚀 日本語 e\u0301 \U0001f3f3\ufe0f\u200d\U0001f308! \ufffd"


def test_every_character_comes_whole_and_in_time(either: TextCodec) -> None:
    stream = either.stream(either.encode("x"), [])
    ids = either.encode(f"x{HARD}")[len(either.encode("x")) :]
    text = "".join(stream.push(token) for token in ids)
    assert text == HARD
    assert stream.flush() == ""


def test_a_text_resumed_anywhere_goes_on_where_its_text_stopped(either: TextCodec) -> None:
    """The client keeps ids of a character's first bytes, whose text it did not get."""
    prompt = either.encode("x")
    ids = either.encode(f"x{HARD}")[len(prompt) :]
    for cut in range(len(ids) + 1):
        before = either.stream(prompt, [])
        text = "".join(before.push(token) for token in ids[:cut])
        after = either.stream([*prompt, *ids[:cut]], [])
        text += "".join(after.push(token) for token in ids[cut:])
        assert text == HARD, cut


def test_half_a_character_at_the_end_is_never_released(either: TextCodec) -> None:
    prompt = either.encode("x")
    ids = either.encode("xok🚀")[len(prompt) :]
    for missing in (1, 2, 3):
        stream = either.stream(prompt, [])
        pieces = [stream.push(token) for token in ids[:-missing]]
        assert "".join(pieces) + stream.flush() == "ok"


def test_a_special_token_is_silent_and_breaks_nothing(either: TextCodec) -> None:
    special = either.encode(SPECIAL)[-1]
    ids = either.encode("xé")[-2:]
    stream = either.stream([*either.encode("x"), special], [])
    assert "".join(stream.push(token) for token in [ids[0], special, ids[1], special]) == "é"


def test_bytes_that_are_no_character_become_a_replacement_each(either: TextCodec) -> None:
    first, second = either.encode("xé")[-2:]
    letter = either.encode("xa")[-1]
    stream = either.stream(either.encode("x"), [])
    pieces = [stream.push(token) for token in (first, letter, second, letter, first, first)]
    assert "".join(pieces) == "\ufffda\ufffda\ufffd"
    assert stream.flush() == ""


def test_a_token_of_a_character_and_a_half_releases_the_whole_one() -> None:
    tokenizer = byte_level()
    a, lead = (tokenizer.encode(text).tokens[0] for text in ("a", "é"))
    vocabulary = {**tokenizer.get_vocab(), a + lead: 256}
    merged = Tokenizer(models.BPE(vocab=vocabulary, merges=[(a, lead)]))
    merged.pre_tokenizer, merged.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    codec = TextCodec(merged.to_str().encode())
    first, second = codec.encode("aé")
    assert first == 256
    stream = codec.stream([], [])
    assert [stream.push(first), stream.push(second)] == ["a", "é"]


def test_spaces_survive_between_tokens_and_behind_bytes(either: TextCodec) -> None:
    prompt = either.encode("a b")
    ids = either.encode("a b c é d")[len(prompt) :]
    stream = either.stream(prompt, [])
    assert "".join(stream.push(token) for token in ids) == " c é d"


def test_bytes_that_are_no_tokenizer_cannot_start() -> None:
    with pytest.raises(StartupError, match="cannot read the target's tokenizer"):
        TextCodec(b"junk")


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


@pytest.mark.parametrize("text", [HARD, "a b", f" {SPECIAL}é"])
def test_where_the_tokens_of_a_prompt_begin(either: TextCodec, text: str) -> None:
    """Each begins where the text of those before it ends, as a whole decoder has it."""
    ids = either.encode(text)
    shown = either.decode(ids)
    begins = either.begins(ids)
    assert begins[0] == 0
    assert None not in begins
    for place in range(1, len(ids)):
        before = either.decode(ids[:place])
        if "\ufffd" not in before[-4:]:  # no half character
            assert begins[place] == len(before), place
    assert begins == sorted(begins, key=lambda begin: begin or 0)
    assert max(begin or 0 for begin in begins) < len(shown)
    if shown == text:
        assert either.begins(text) == begins


def test_what_the_template_adds_begins_nowhere() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([SPECIAL])
    mark = tokenizer.token_to_id(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, mark)]
    )
    codec = TextCodec(tokenizer.to_str().encode())
    assert codec.begins("aé") == [None, 0, 1, 1]
    assert mark is not None
    assert codec.begins([mark, *codec.encode("a", special=False)]) == [0, len(SPECIAL)]


def test_where_generated_tokens_begin(codec: TextCodec) -> None:
    stream = codec.stream((), ("cd",))
    found = []
    for token_id in codec.encode("é🚀abcd"):
        found.append(stream.place_of(token_id))
        stream.push(token_id)
    assert found == [0, 0, 1, 1, 1, 1, 2, 3, 4, 5]
    assert stream.stop_string == "cd"
