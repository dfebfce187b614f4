"""The requests of a load: given one by one, or in a file that ghz reads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.failure import Misconfigured
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.requests import RequestFile, requests
from tests.support.repository import ROOT

PROMPTS = ROOT / "deploy" / "ghz" / "prompts.json"


def asked(data: Path | None = None, **changed: object):
    given = {"prompts": None, "max_new_tokens": None, "temperature": None, "seed": 0}
    options: dict[str, Any] = {**given, **changed}
    wanted = {name: options.pop(name) for name in ("verifier", "gamma") if name in options}
    return requests(data, **options, speculation=pb.Speculation(**wanted))


def test_prompts_are_taken_in_turn_with_seeds_that_go_up() -> None:
    request = asked(prompts=["a", "b"], seed=7, max_new_tokens=5, verifier="token", gamma=0)
    texts = [request(number) for number in range(3)]
    assert [text.prompt for text in texts] == ["a", "b", "a"]
    assert [text.sampling.seed for text in texts] == [7, 8, 9]
    assert texts[0].stopping.max_new_tokens == 5
    assert texts[0].stopping.ignore_eos
    assert (texts[0].speculation.verifier, texts[0].speculation.gamma) == ("token", 0)
    assert not asked()(0).speculation.HasField("gamma")


def test_a_file_says_what_is_asked_and_the_number_is_its_seed() -> None:
    rows = json.loads(PROMPTS.read_text())
    request = asked(PROMPTS, gamma=3)
    for number in (0, 1, len(rows)):
        text = request(number)
        assert text.prompt == rows[number % len(rows)]["generation"]["prompt"]
        assert text.sampling.seed == number
        assert text.speculation.gamma == 3


def test_the_mix_has_three_lengths_that_fit_the_embedded_pair() -> None:
    """And is what ghz takes: an array from its first byte, whose only template is the seed."""
    raw = PROMPTS.read_text()
    assert raw.startswith("[")
    file = RequestFile(PROMPTS)
    rows = json.loads(raw)
    assert raw.count("{{") == raw.count("{{.RequestNumber}}") == len(rows)
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "target" / "tokenizer.json"))
    texts = [file.generation(number) for number in range(len(rows))]
    lengths = [len(tokenizer.encode(text.prompt).ids) for text in texts]
    for low, high in ((1, 32), (50, 400), (500, 1200)):
        assert sum(low <= length < high for length in lengths) >= 4
    longest = max(n + t.stopping.max_new_tokens for n, t in zip(lengths, texts, strict=True))
    assert longest <= 2048


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (' [{"generation": {"prompt": "a"}}]', "first character"),
        ("[]", "empty"),
        ('[{"prompt": "a"}]', "request 0"),
        ('[{"generation": {"prompt": "a"}}, {}]', "request 1 has no generation"),
        ("[{]", "no list of requests"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(Misconfigured, match=reason):
        RequestFile(path)


def test_a_file_and_its_own_words_exclude_each_other() -> None:
    with pytest.raises(Misconfigured, match="--temperature"):
        asked(PROMPTS, temperature=0.5)
    with pytest.raises(Misconfigured, match="cannot read"):
        asked(Path("/nowhere.json"))
    with pytest.raises(Misconfigured, match="out of range"):
        asked(max_new_tokens=1 << 40)
