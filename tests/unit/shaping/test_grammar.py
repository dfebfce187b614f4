"""The state of a grammar: by place, back and forth, as one that begins anew each time."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, models

from tandem.errors import InvalidRequest
from tandem.shaping import grammar as grammar_module
from tandem.shaping.grammar import Bits, Grammars, GrammarState
from tandem.speculation.request.shaping import Grammar, GrammarKind
from tests.support.laws.shaping import END, LETTERS, tokenizer_json

SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yy"]}},'
    '"required":["a"],"additionalProperties":false}',
)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def letters(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def may_come(state: GrammarState, path: str = "") -> str:
    """The letters that may come after a path."""
    bits: Bits = np.zeros(1, np.uint32)
    state.allow(letters(path), bits)
    return "".join(letter for i, letter in enumerate(LETTERS) if bits[0] >> i & 1)


def test_each_place_has_the_mask_of_its_own_path() -> None:
    state = Grammars(tokenizer_json, len(LETTERS), (END,)).state(regex("ab?|bb"))
    found = {path: may_come(state, path) for path in ("a", "", "ab", "b", "bb", "a", "abe")}
    assert found == {"": "ab", "a": "be", "ab": "e", "b": "b", "bb": "e", "abe": ""}
    # Nothing reaches these places, so nothing is asked of them.
    assert may_come(state, "aa") == may_come(state, "ba") == may_come(state, "eb") == LETTERS


def test_it_goes_on_with_emitted_tokens_alone() -> None:
    state = Grammars(tokenizer_json, len(LETTERS), (END,)).state(regex("ab?|bb"))
    may_come(state, "bb")
    state.extend(letters("a"))
    assert may_come(state) == "be"
    assert may_come(state, "b") == "e"
    state.extend(letters("e"))
    assert may_come(state) == may_come(state, "a") == ""


def test_a_model_without_an_end_has_none() -> None:
    state = Grammars(tokenizer_json, len(LETTERS), ()).state(regex("ab?"))
    assert [may_come(state, path) for path in ("", "a", "ab")] == ["a", "b", ""]


def test_texts_of_one_grammar_have_states_of_their_own() -> None:
    grammars = Grammars(tokenizer_json, len(LETTERS), (END,))
    one, other = grammars.state(regex("ab")), grammars.state(regex("ab"))
    one.extend(letters("a"))
    assert (may_come(one), may_come(other)) == ("b", "a")
    assert may_come(grammars.state(regex("ab"))) == "a"


def test_walks_over_a_tree_leave_no_trace(embedded_pair: tuple[Path, Path]) -> None:
    tokenizer = (embedded_pair[1] / "tokenizer.json").read_bytes()
    vocab_size, ends = 2048, (0,)
    grammars = Grammars(lambda: tokenizer, vocab_size, ends)
    source = random.Random(7)
    state = grammars.state(SCHEMA)
    emitted: list[int] = []
    for _ in range(12):
        paths: list[list[int]] = [[]]
        for _ in range(12):  # grow a tree by allowed tokens, and some that are not
            path = source.choice(paths)
            bits: Bits = np.zeros(vocab_size // 32, np.uint32)
            state.allow(path, bits)
            known = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()
            tokens = [*known[:2], *known[-2:], source.randrange(vocab_size)]
            paths.append([*path, source.choice(tokens)])
        for path in source.sample(paths, len(paths)):
            fresh = grammars.state(SCHEMA)
            fresh.extend(emitted)
            ours, theirs = np.zeros((2, vocab_size // 32), np.uint32)
            state.allow(path, ours)
            fresh.allow(path, theirs)
            assert (ours == theirs).all(), (emitted, path)
        bits = np.zeros(vocab_size // 32, np.uint32)
        state.allow([], bits)
        known = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        if not known:
            break
        emitted.append(source.choice(known))
        state.extend(emitted[-1:])


# Each character is a token; byte-level tokenizers spell the last three in their own way.
JSON, SPELLED = '{}[]":,a1 \n\t', '{}[]":,a1ĠĊĉ'
INDENTED = '{\n\t"a": [\n\t\t1,\n\t\t{"a":1}\n\t]\n}'


def taken(text: str, schema: str) -> str:
    """As much of a text as a schema lets come."""
    grammars = Grammars(lambda: tokenizer_json(SPELLED), len(SPELLED), ())
    state = grammars.state(Grammar(GrammarKind.JSON_SCHEMA, schema))
    for count, letter in enumerate(text):
        try:
            state.extend([JSON.index(letter)])
        except InvalidRequest:
            return text[:count]
    return text


@pytest.mark.parametrize("schema", ["{}", " true", '{"x-guidance":{"item_separator":","}}'])
def test_white_space_of_json_is_bounded(schema: str) -> None:
    assert taken(INDENTED, schema) == INDENTED
    for before in ("{", '{"a"', '{"a":', '{"a":1', "[1,"):
        assert taken(before + "\n" * 400, schema) == before + "\n" * 64
        mixed = before + "\n \t" * 133
        assert taken(mixed, schema) == mixed[: len(before) + 64]


def test_a_schema_may_name_other_white_space() -> None:
    endless = json.dumps({"x-guidance": {"whitespace_pattern": "[\n]+"}})
    assert taken("{" + "\n" * 400, endless) == "{" + "\n" * 400
    assert taken("{ ", endless) == "{"


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (regex("a(b"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (Grammar(GrammarKind.LARK, "start: nothing"), "unknown name"),
        (Grammar(GrammarKind.LARK, "start: x\nx[max_tokens=5]: /.*/"), "cannot go back"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"no"}'), "Invalid type: no"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), ""),
        (Grammar(GrammarKind.LARK, 'start: "a"\n' + "#" * 60_000 + "\nx: %"), ""),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(grammar: Grammar, sentence: str) -> None:
    grammars = Grammars(tokenizer_json, len(LETTERS), (END,))
    with pytest.raises(InvalidRequest, match=f"^sampling.shaping.grammar: .*{sentence}") as caught:
        grammars.check(grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_came_before_must_keep_to_it() -> None:
    grammars = Grammars(tokenizer_json, len(LETTERS), (END,))
    grammars.check(regex("ab"), letters("abe"))
    with pytest.raises(InvalidRequest, match="token 2 of those that were generated before, 0,"):
        grammars.check(regex("ab"), letters("aa"))
    with pytest.raises(InvalidRequest, match="token 4"):
        grammars.check(regex("ab"), letters("abea"))


def test_it_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="needs a model with a tokenizer"):
        Grammars(bytes, 3, ()).state(regex("a"))


def test_a_tokenizer_of_words_has_no_grammars() -> None:
    words = Tokenizer(models.WordLevel({"true": 0, "[": 1}, unk_token="["))
    grammars = Grammars(lambda: words.to_str().encode(), 2, ())
    assert not grammars.exist
    with pytest.raises(InvalidRequest, match="needs a model with a tokenizer of bytes"):
        grammars.state(regex("true"))


def test_a_text_beyond_the_bounds_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LIMITS", LLParserLimits(max_lexer_states=20))
    grammars = Grammars(tokenizer_json, len(LETTERS), (END,))
    wide = regex("(a|b)*a(a|b){40}")
    state, other = grammars.state(wide), grammars.state(wide)
    for count in range(100):
        if not may_come(state):
            break
        state.extend(letters("ab"[count % 2]))
    assert not may_come(state), "no token may come any more"
    assert may_come(other), "another text of the same grammar goes on"
