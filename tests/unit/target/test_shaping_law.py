"""Texts whose logits a request shapes: their law is that of plain decoding with the same shaping.

The generators that serve are enumerated, drafts inside included. The target's weights are shaped by
the code that serves, and compared with a second description that reads whole texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

import target_svc.round
from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.drafter import DraftSequence
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Steps
from tandem.errors import InvalidRequest
from tandem.shaping.text import ShapedRows, ShapedText
from tandem.speculation.draft import Draft
from tandem.speculation.request.shaping import Grammar, GrammarKind, Shaping
from tandem.speculation.tree import DraftSize
from tandem.verification import VERIFIERS
from tests.support.laws.runs.answering import LENGTH
from tests.support.laws.runs.law import SEEN, SIZES, RunLaw
from tests.support.laws.shaping import END, law_of, shaped
from tests.support.laws.suited import tried_rules
from tests.support.laws.tables import PROMPT, Text

OTHERS = pytest.mark.campaign(
    "all controls with every method, and each alone with `token`, leave the shaped law as it is",
    "a method of each kind and every rule with all controls; each control alone with chains"
    " under `block`, all but the bias with trees (this file)",
)

# The penalties and the bias are float32.
TOLERANCE = 1e-6


def _regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


CONTROLS = {
    "bias": Shaping(logit_bias=((0, 1.5), (2, -2.0))),
    "penalties": Shaping(repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=-0.6),
    "min_tokens": Shaping(min_tokens=2, end_token_ids=(END,)),
    "bad_words": Shaping(bad_words=((1, 0), (0, 0, 2), (2, 2))),
    # A place where nothing may come, after the first letter or the third.
    "grammar": Shaping(grammar=_regex("b|a(a|b)b?")),
    "grammar_with_end": Shaping(grammar=_regex("b|a*b?"), end_token_ids=(END,)),
    "all": Shaping(
        ((0, 0.7), (1, -0.4)),
        1.3,
        0.5,
        0.3,
        2,
        (END,),
        ((0, 1, 1),),
        _regex("(a|b)*"),
    ),
}


def _law(
    name: str, rule: str, shaping: Shaping, *, on_device: bool = False, log_probs: bool = False
) -> RunLaw:
    sizes = SIZES[:1] if VERIFIERS[rule].needs_every_draft else SIZES
    return RunLaw(
        name,
        rule,
        sizes,
        on_device=on_device,
        shaped=lambda: shaped(shaping, PROMPT),
        end_token_ids=shaping.end_token_ids,
        log_probs=log_probs,
    )


def _expected(law: RunLaw, shaping: Shaping) -> dict[Text, float]:
    """The law of the first tokens under the target alone."""
    found: dict[Text, float] = {}

    def go_on(text: Text, chance: float) -> None:
        over = len(text) == LENGTH or (text and text[-1] in shaping.end_token_ids)
        row = None if over else law_of(np.log(law.row(text)), shaping, PROMPT, text)
        if row is None:
            found[text] = chance
            return
        for token in np.flatnonzero(row).tolist():
            go_on((*text, token), chance * float(row[token]))

    go_on((), 1.0)
    return found


def _error(law: RunLaw, shaping: Shaping) -> float:
    served, expected = law.law(), _expected(law, shaping)
    return max(abs(served.get(t, 0.0) - expected.get(t, 0.0)) for t in {*served, *expected})


# A method of each kind; all of them in a campaign.
KINDS = ("model", "tree", "chains", "lookup", "eagle", "masks")


def _cases() -> list[Any]:
    """All controls with every rule that suits a method; each alone with chains and trees."""
    together = [
        pytest.param(
            *(name, rule.name, on_device, "all"),
            marks=() if name in KINDS else OTHERS,
        )
        for name in METHODS
        for rule in tried_rules(name)
        for on_device in ((False, True) if name == "model" else (False,))
        if rule.lossless
    ]
    alone = [
        pytest.param(
            *(name, rule, False, control),
            marks=OTHERS if rule == "token" or (name, control) == ("tree", "bias") else (),
        )
        for name, rule in (("model", "block"), ("model", "token"), ("tree", "block"))
        for control in CONTROLS
        if control != "all"
    ]
    return together + alone


@pytest.mark.parametrize(("name", "rule", "on_device", "control"), _cases())
def test_a_shaped_text_follows_the_shaped_law(
    name: str, rule: str, on_device: bool, control: str
) -> None:
    shaping = CONTROLS[control]
    assert _error(_law(name, rule, shaping, on_device=on_device), shaping) < TOLERANCE


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("control", ["grammar", "all"])
def test_so_does_one_whose_layers_overlap(groups: int, control: str) -> None:
    shaping = CONTROLS[control]
    law = RunLaw(
        "model",
        "block",
        (DraftSize(0),),
        shaped=lambda: shaped(shaping, PROMPT),
        end_token_ids=shaping.end_token_ids,
        groups=groups,
        guesses=2 if groups == 2 else 1,
    )
    assert _error(law, shaping) < TOLERANCE


@pytest.mark.parametrize("name", ["model", "tree", "chains"])
def test_log_probabilities_are_read_at_the_places_of_their_tokens(name: str) -> None:
    shaping = CONTROLS["grammar"]
    assert _error(_law(name, "token", shaping, log_probs=True), shaping) < TOLERANCE


def test_a_drafter_that_shapes_nothing_leaves_the_law_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftSequence, "shaped_rows", lambda self, paths: None)
    for name, rule, control in (("model", "block", "grammar"), ("tree", "token", "all")):
        shaping = CONTROLS[control]
        assert _error(_law(name, rule, shaping), shaping) < TOLERANCE


def _once_a_round(
    own: Callable[..., list[Sequence[int]]],
) -> Callable[[Draft], list[Sequence[int]]]:
    """The state of the text's end at every place."""
    return lambda draft: [() for _ in own(draft)]


def _counting_what_was_rejected(self: ShapedText, paths: Sequence[Any], own: Any) -> ShapedRows:
    rows: ShapedRows = own(self, paths)
    for token_id in paths[-1] or ():
        self._entries.see(token_id, 1)
    return rows


def _without_the_last_row(self: ShapedText, paths: Sequence[Any], own: Any) -> ShapedRows:
    """What is drawn after a whole draft is not masked."""
    rows: ShapedRows = own(self, paths)
    if rows.bits is not None:
        rows.bits[-1] = np.uint32(0xFFFFFFFF)
    return rows


def _is_seen(law: RunLaw, shaping: Shaping) -> bool:
    """Whether the law is wrong, or a text breaks its grammar."""
    try:
        return _error(law, shaping) > SEEN
    except InvalidRequest as error:
        return "does not keep to it" in str(error)


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("model", "penalties"),
        pytest.param("tree", "penalties", marks=OTHERS),
        *product(("model", "tree"), ("min_tokens", "bad_words", "grammar")),
    ],
)
def test_a_state_once_a_round_is_seen(
    name: str, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_svc.round, "_paths", _once_a_round(target_svc.round._paths))
    assert _is_seen(_law(name, "block", CONTROLS[control]), CONTROLS[control])


@pytest.mark.parametrize(
    ("mutant", "control"),
    [(_counting_what_was_rejected, "penalties"), (_without_the_last_row, "grammar")],
)
def test_a_state_that_is_not_the_place_s_is_seen(
    mutant: Any, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ShapedText.rows
    monkeypatch.setattr(ShapedText, "rows", lambda self, paths: mutant(self, paths, own))
    monkeypatch.setattr(DraftSequence, "shaped_rows", lambda self, paths: None)
    assert _is_seen(_law("model", "token", CONTROLS[control]), CONTROLS[control])


def test_a_draft_that_is_cut_at_its_first_forbidden_token_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As vLLM does with grammars: the token is withdrawn instead of rejected.
    own = ModelDrafter.draft

    def cut(self: ModelDrafter, sequence: DraftSequence, *args: Any) -> Steps[Draft]:
        draft = yield from own(self, sequence, *args)
        tokens = draft.token_ids
        assert sequence.shaped is not None
        bits = sequence.shaped.rows([tokens[:end] for end in range(len(tokens))]).bits
        assert bits is not None
        allowed = [int(row[0]) >> token & 1 for row, token in zip(bits, tokens, strict=True)]
        kept = (*allowed, 0).index(0)
        entries = sum(draft.sizes[:kept])
        return Draft(
            tokens[:kept], draft.sizes[:kept], draft.ids[:entries], draft.weights[:entries]
        )

    monkeypatch.setattr(ModelDrafter, "draft", cut)
    monkeypatch.setattr(DraftSequence, "shaped_rows", lambda self, paths: None)
    shaping = CONTROLS["grammar"]
    assert _error(_law("model", "token", shaping), shaping) > SEEN
