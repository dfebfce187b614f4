"""What is told of probes is what the model computes there, and no rule sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import target_svc.round
from tandem.engine.answers import Decision
from tandem.errors import InvalidRequest
from tandem.inference.decoder import Decoder
from tandem.rpc import messages
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.probes import NO_PROBES, Probes
from target_svc.round import verify
from tests.support.models.architectures import LLAMA, VOCAB_SIZE, build
from tests.support.models.parity import TOLERANCE, plain_logits
from tests.support.models.probes import (
    EXTRA,
    NODES,
    PROMPT,
    begun,
    decoder_of,
    drafts,
    probed,
    rounds_of,
    run,
)


def told_of(decoder: Decoder, draft: Draft, wanted: FeedbackWanted) -> Decision:
    sequence = begun(decoder, wanted=wanted)
    decision: Decision = run(decoder, verify(decoder, sequence, 1, draft, wanted))
    decoder.release(sequence.caches[0])
    return decision


@pytest.mark.parametrize("kind", ["chain", "tree", "none"])
def test_predictions_are_the_models_own_behind_each_path(kind: str) -> None:
    decoder = decoder_of(LLAMA)
    draft = probed(drafts()[kind], 12, extra=0)
    first = begun(decoder)
    text = [*PROMPT, first.last_token]
    ways = [[draft.token_ids[at - 1] for at in draft.path_to(p)] for p in range(len(draft) + 1)]
    for token_id, parent in zip(draft.probes.token_ids, draft.probes.parents, strict=True):
        ways.append([*ways[parent], token_id])
    model = build(LLAMA)
    expected = [plain_logits(model, [[*text, *way]])[0][-1] for way in ways]
    twins = [node for node, home in enumerate(draft.homes(), 1) if home != node]

    told = told_of(decoder, draft, FeedbackWanted(top=5, everywhere=True)).feedback
    assert told is not None
    assert told.predicted is not None
    assert list(told.predicted) == [place for place in range(len(ways)) if place not in twins]
    for place, (ids, weights, mass) in told.predicted.items():
        values, likeliest = expected[place].topk(5)
        shares = ((values - values[0]).exp() * 65535).round()
        kept = shares > 0
        assert ids.tolist() == likeliest[kept].tolist()
        assert np.abs(weights - shares[kept].numpy()).max() < 65535 * TOLERANCE
        together = float(expected[place].softmax(-1)[likeliest].sum())
        assert abs(mass / 65535 - together) < TOLERANCE + 1 / 65535

    top = told_of(decoder, draft, FeedbackWanted(top=1, everywhere=True)).feedback
    assert top is not None
    assert top.predicted is not None
    of_top = {place: row.ids.tolist() for place, row in top.predicted.items()}
    assert of_top == {place: [int(expected[place].argmax())] for place in told.predicted}

    decision = told_of(decoder, draft, FeedbackWanted(top=5))
    assert decision.feedback is not None
    kept_of = decision.feedback.predicted
    assert kept_of is not None
    behind = draft.probes.behind(decision.place, len(draft))
    assert list(kept_of) == [0, *draft.path_to(decision.place), *behind]


class Operators(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(decoder: Decoder, wanted: FeedbackWanted | None, *, feedback: bool) -> int:
    sequence = begun(decoder, wanted=wanted)
    counted = Operators()
    with counted:
        run(decoder, verify(decoder, sequence, 1, drafts()["chain"], wanted if feedback else None))
    decoder.release(sequence.caches[0])
    return counted.count


def test_nothing_asked_for_is_nothing_computed() -> None:
    """Not an operator more; and with predictions some, so that the count sees them."""
    decoder = decoder_of(LLAMA)
    operators(decoder, None, feedback=False)  # what is made once
    plain = operators(decoder, None, feedback=False)
    assert operators(decoder, None, feedback=True) == plain
    wanted = FeedbackWanted(top=4)
    assert operators(decoder, wanted, feedback=False) == plain
    assert plain < operators(decoder, wanted, feedback=True) <= plain + 16


def test_nothing_asked_for_is_nothing_sent() -> None:
    """The messages have the bytes that their other fields have."""
    draft = drafts()["chain"]
    message = messages.draft_to(draft)
    assert not message.HasField("probes")
    beside = messages.draft_to(probed(draft, 8))
    beside.ClearField("probes")
    assert beside.SerializeToString() == message.SerializeToString()


def test_a_probe_that_the_rule_sees_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that were candidates would be kept, and what is emitted would be another text."""

    def as_candidates(
        sequence: Any, round_: int, draft: Any, scored: Any, *wanted: Any, **named: Any
    ) -> Any:
        count = len(draft)
        parents = [*draft.places(), *draft.probes.parents]
        tokens = [*draft.token_ids, *draft.probes.token_ids]
        seen = replace(
            Draft.certain(tokens, parents), sizes=[*draft.sizes, *[0] * (len(tokens) - count)]
        )
        scored = replace(scored, count=1 + len(tokens))
        as_told = replace(seen, ids=draft.ids, weights=draft.weights)
        return own(sequence, round_, as_told, scored, *wanted, **named)

    decoder = decoder_of(LLAMA)
    draft = probed(drafts()["chain"], 40, extra=0)
    plain, _ = rounds_of(decoder, replace(draft, probes=NO_PROBES))
    own = target_svc.round.decide
    monkeypatch.setattr(target_svc.round, "decide", as_candidates)
    caught, _ = rounds_of(decoder, draft)
    assert [one.emitted for one in plain] != [one.emitted for one in caught]


@pytest.mark.parametrize(
    ("probes", "sentence"),
    [
        (Probes((1,), (3,)), r"parents\[0\] = 3 is after a repeated sibling"),
        (Probes((1,), (6,)), r"parents\[0\] = 6 does not come before its probe"),
        (Probes((1, 2), (0, 8)), r"parents\[1\] = 8 does not come before its probe"),
        (Probes((1, 2), (0,)), r"parents holds 1 places for 2 probes"),
        (Probes((VOCAB_SIZE + 3,), (0,)), r"token_ids holds id 100.*97 and 3 extra"),
    ],
)
def test_probes_that_hang_at_nothing_are_refused(probes: Probes, sentence: str) -> None:
    draft = replace(drafts()["tree"], probes=probes)
    message = messages.draft_to(draft)
    with pytest.raises(InvalidRequest, match=r"draft\.probes\." + sentence):
        messages.draft_from(message, VOCAB_SIZE, 16, NODES, EXTRA)


def test_probes_beyond_the_room_are_refused_and_candidates_may_not_be_extra_ids() -> None:
    draft = probed(drafts()["tree"], 8)
    message = messages.draft_to(draft)
    assert messages.draft_from(message, VOCAB_SIZE, 16, 13, EXTRA).probes == draft.probes
    for nodes, room in ((12, 7), (5, 0)):
        with pytest.raises(InvalidRequest, match=rf"holds 8 probes.* room for {room} beside 5"):
            messages.draft_from(message, VOCAB_SIZE, 16, nodes, EXTRA)
    chain = messages.draft_to(probed(Draft.certain([1, 2]), 1))
    with pytest.raises(InvalidRequest, match=r"holds 1 probes.* room for 0 beside 2"):
        messages.draft_from(chain, VOCAB_SIZE, 16, 0, EXTRA)
    extra = messages.draft_to(Draft.certain([VOCAB_SIZE]))
    with pytest.raises(InvalidRequest, match=r"token_ids holds id 97"):
        messages.draft_from(extra, VOCAB_SIZE, 16, NODES, EXTRA)
