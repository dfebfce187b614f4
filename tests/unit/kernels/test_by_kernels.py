"""What the engine asks a GPU's kernels, by their operators' form for a CPU: the same verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tandem.engine.answers import ScoredRows
from tandem.engine.asks import Decide, Draw, Truncation
from tandem.engine.numbers.by_kernels import decided_by_kernels
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.engine.numbers.draws import draw
from tandem.inference.feed import Feed
from tandem.kernels import draws, operators, verdicts
from tandem.kernels.warm_up import warm_up
from tandem.shaping.text import ShapedRows, ShapedText
from tandem.speculation.draft import NO_DRAFT, Draft
from tandem.speculation.randomness import Purpose, RandomNumbers, VerdictNumbers, digits
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import Shaping
from tandem.verification import VERIFIERS
from tests.support.devices.by_operators import by_operators
from tests.support.devices.counting import Kernels

V = 12
CHAIN, TREE = (0, 1, 2), (0, 0, 1, 1, 3)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.7, top_k=6, top_p=0.9),
    Sampling(min_p=0.05),
]


def drafted(parents: Sequence[int], seed: int, certain: bool = False) -> Draft:
    """A draft whose siblings share a row, and are distinct."""
    numbers = np.random.default_rng(seed)
    tokens, row_of, rows = [0] * len(parents), [0] * len(parents), []
    for row, place in enumerate(dict.fromkeys(parents)):
        children = [node for node, parent in enumerate(parents) if parent == place]
        ids = numbers.permutation(V)[:7]
        rows.append((ids, np.sort(numbers.integers(1, 65536, 7))[::-1]))
        for node, token in zip(children, ids, strict=False):
            tokens[node], row_of[node] = int(token), row
    if certain:
        return Draft.certain(tokens, parents)
    return Draft(
        tokens,
        [7] * len(rows),
        np.concatenate([ids for ids, _ in rows]).astype(np.uint32),
        np.concatenate([weights for _, weights in rows]).astype(np.uint16),
        None if parents == tuple(range(len(parents))) else list(parents),
        None if parents == tuple(range(len(parents))) else row_of,
        distinct=True,
    )


def asks_of(
    drafts: Sequence[Draft], rule: str, seed: int, shaped: bool = False, device: str = "cpu"
) -> list[Decide]:
    """Verdicts over rows of one pass, after a row that is none of theirs."""
    numbers = torch.Generator().manual_seed(seed)
    counts = [1 + len(draft.computed()) for draft in drafts]
    logits = 2 * torch.randn(1 + sum(counts), V, generator=numbers)
    logits = logits.to(device)
    asks, first = [], 1
    for place, (draft, count) in enumerate(zip(drafts, counts, strict=True)):
        sampling = SAMPLINGS[(seed + place) % len(SAMPLINGS)]
        rows: ShapedRows | None = None
        if shaped:
            shaping = Shaping(logit_bias=((3, 2.0),), frequency_penalty=0.5)
            rows = ShapedText(shaping, V, [1, 2], None).rows([[5, 5]] * count)
        asks.append(
            Decide(
                rule=VERIFIERS[rule],
                draft=draft,
                scored=ScoredRows(logits, first, count),
                sampling=sampling,
                carry=None,
                numbers=VerdictNumbers.of(seed * 100 + place),
                round=1,
                shaped=rows,
            )
        )
        first += count
    return asks


def told(asks: Sequence[Decide]) -> list[Any]:
    answers: Any = decide(asks)
    return decisions_of(answers)


DRAFTS = [
    drafted(CHAIN, 1),
    NO_DRAFT,
    drafted(TREE, 2),
    drafted(CHAIN, 3, certain=True),
    drafted(TREE, 4, certain=True),
    drafted((0, 0, 0), 5),
]


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("shaped", [False, True])
def test_verdicts_are_those_without_kernels(rule: str, shaped: bool) -> None:
    kept = 0
    for seed in range(12):
        expected = told(asks_of(DRAFTS, rule, seed, shaped))
        with by_operators() as asked:
            found = told(asks_of(DRAFTS, rule, seed, shaped))
        assert asked["decide"] == 1
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.place, ours.next_token) == (theirs.place, theirs.next_token)
            assert ours.overlaps == pytest.approx(theirs.overlaps, abs=1e-6)
            kept += ours.place > 0
    assert kept > 5


def test_what_kernels_do_not_decide_is_decided_without_them() -> None:
    """Twins, children of several rows at a place, another rule; the rest of the batch by them."""
    ids, weights = np.array([4, 5, 1, 2, 3], np.uint32), np.full(5, 9000, np.uint16)
    twins = Draft([4, 4], [5], ids, weights, [0, 0], [0, 0])
    rows = Draft([4, 5], [5, 5], np.tile(ids, 2), np.tile(weights, 2), [0, 0], [0, 1])
    drafts = [twins, rows, DRAFTS[0]]
    expected = told(asks_of(drafts, "block", 3))
    with by_operators() as asked:
        found = told(asks_of(drafts, "block", 3))
        assert [decided_by_kernels(ask) for ask in asks_of(drafts, "block", 3)] == [
            False,
            False,
            True,
        ]
        assert not any(decided_by_kernels(ask) for ask in asks_of([DRAFTS[2]], "spectr", 3))
    assert asked["decide"] == 1
    assert [(one.place, one.next_token) for one in found] == [
        (one.place, one.next_token) for one in expected
    ]


# Kernels of a verdict: laws, what is left of the target's rows, the two of a verdict; of a chain
# that is there, its rows joined. Operators count: `decide` launches two, `draw` too.
A_VERDICT, A_DRAW = 4, 3
SENT = 2


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_verdict_takes_few_kernels(rule: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        asks = asks_of(DRAFTS, rule, 1, device="cuda")
        with Kernels() as kernels:
            decide(asks)
    assert kernels.ran["decide"] == kernels.ran["laws"] == 1
    assert kernels.ran["send"] <= SENT
    assert kernels.ran.total() - kernels.ran["send"] <= A_VERDICT, kernels.ran


def draw_asks(counts: tuple[int, ...]) -> list[Draw]:
    return [
        Draw(
            None,  # type: ignore[arg-type]
            Feed(None, [0], 1),  # type: ignore[arg-type]
            sampling,
            Truncation(0.99, 512),
            V,
            RandomNumbers(seed, Purpose.DRAFT, digits),
            1,
            0,
            8,
            counts,
            distinct=True,
        )
        for seed, sampling in enumerate(SAMPLINGS)
    ]


@pytest.mark.parametrize("counts", [(1,), (3,)])
def test_a_draw_takes_few_kernels(counts: tuple[int, ...]) -> None:
    asks = draw_asks(counts)
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.randn(len(asks), V, device="cuda")
        with Kernels() as kernels:
            draw(asks, logits, range(len(asks)))
    assert kernels.ran["draw"] == kernels.ran["send"] == 1
    assert kernels.ran.total() - kernels.ran["send"] <= A_DRAW, kernels.ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_texts_launch_was_compiled_at_the_start(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    ahead_of_time = pytest.importorskip("tests.unit.kernels.ahead_of_time")
    for module, name in ((draws, "draw"), (draws, "laws"), (verdicts, "decide")):
        monkeypatch.setattr(module, f"_{name}", getattr(module, f"_{name}_by_triton"))
    monkeypatch.setattr(operators, "take", lambda _: True)
    at_start = ahead_of_time.launches(lambda: warm_up(torch.device("meta"), V, "bfloat16"))
    compiled = {launch.key() for launch in at_start}

    def texts() -> None:
        asks = asks_of(DRAFTS, "token", 2)
        logits = asks[0].scored.logits.to(dtype)
        for ask in asks:
            ask.scored.logits = logits
        decide(asks)
        decide(asks[:1])
        for counts in ((1,), (3,)):
            each = draw_asks(counts)
            draw(each, logits, range(len(each)))
            draw(each[:1], logits, [2])

    found = ahead_of_time.launches(texts)
    assert {launch.kernel.__name__ for launch in found} == {"find", "pick", "judge", "follow"}
    assert {launch.key() for launch in found} <= compiled


def test_on_a_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_draw", None)
    warm_up(torch.device("cpu"), V, "float32")
