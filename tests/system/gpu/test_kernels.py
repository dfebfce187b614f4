"""Kernels of a real GPU beside their forms for a CPU, in float64, on the same numbers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tandem.inference.batch.packed import Packing
from tandem.inference.batch.tiles import Tiles
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import KVPool
from tandem.kernels import attention, draws, layer, verdicts
from tandem.speculation.categorical import Categorical
from tandem.speculation.request.sampling import Sampling
from tests.support.devices.drafted import CHAIN, KINDS, SAMPLINGS, Kind, drafted, drawn_from
from tests.support.devices.forest import Heads, empty_pool, fill, forest

pytestmark = pytest.mark.campaign(
    "passes, rounds, kernels and the law on a real GPU",
    "unit/inference/passes and batch, unit/kernels: the same code with fake devices, kernels "
    "interpreted",
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Of the largest number, in a dtype's own rounding.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
SHAPES: list[Heads] = [
    (32, 8, 128, 128),
    (14, 2, 64, 64),
    (4, 4, 16, 16),
    (8, 4, 256, 256),
    (16, 1, 96, 96),
    (71, 1, 64, 64),
    (6, 2, 80, 48),
]


def attended(
    feeds: list[Feed],
    pool: KVPool,
    heads: Heads,
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float = 0.0,
) -> float:
    """The largest difference from float64, as a share of the largest number."""
    segments = Packing.of(feeds).segments
    states = [part.to(dtype) for part in fill(pool, segments, heads)]
    found: list[Tensor] = []
    for device, kind in ((CPU, torch.float64), (CUDA, dtype)):
        tiles = Tiles(segments, device)
        query, keys, values = (part.to(device, kind) for part in states)
        repeats = [
            attention.attend(
                query,
                keys,
                values,
                *tiles.seen(window),
                tiles.counts,
                tiles.size,
                tiles.words,
                0.2,
                softcap,
            )
            for _ in range(1 if device == CPU else 3)
        ]
        assert all(torch.equal(repeats[0], each) for each in repeats), "bits that vary"
        assert not tiles.counts.any()
        found.append(repeats[0].cpu().double())
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


# A kernel is compiled for each shape and dtype, which takes a second.
CASES = [
    *((heads, torch.bfloat16) for heads in SHAPES),
    *((heads, dtype) for heads in SHAPES[:3] for dtype in (torch.float32, torch.float16)),
]


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_attention_is_that_of_float64(heads: Heads, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for seed, most in enumerate((1, 4, 16, 17, 64, 130)):
        for window, softcap in ((None, 0.0), (7, 0.0), *([(None, 1.5)] if most == 17 else [])):
            pool = empty_pool(3000, heads)
            feeds = forest(random.Random(seed), most, pool, trees=bool(seed % 2))
            apart = attended(feeds, pool, heads, dtype, window, softcap)
            assert apart < CLOSE[dtype], (most, window, softcap)


@pytest.mark.parametrize("rows", [1, 5, 17, 65])
@pytest.mark.parametrize("length", [100, 3000, 20_000])
def test_long_texts_are_split(rows: int, length: int) -> None:
    torch.manual_seed(2)
    heads = (32, 8, 128, 128)
    pool = empty_pool(2 * length + 400, heads)
    feeds = []
    for parents in (None, [i // 2 for i in range(rows - 1)] or None):
        cache = pool.reserve(length + 200)
        assert cache is not None
        cache.length = length
        feeds.append(Feed(cache, [1] * rows, 0, parents))
    for own in (feeds[:1], feeds[1:], feeds):
        assert attended(own, pool, heads, torch.bfloat16) < CLOSE[torch.bfloat16]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("queries", "count", "width"), [(32, 8, 128), (14, 2, 64), (4, 2, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_turned_heads_are_those_of_float64(
    normed: bool, queries: int, count: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    rows = 9
    heads = torch.randn(rows, queries + 2 * count, width).to(dtype)
    turns = torch.polar(torch.ones(rows, 1, width // 2), 9 * torch.randn(rows, 1, width // 2))
    slots = torch.randperm(40)[:rows]
    gain = torch.rand(queries + count, width) if normed else None
    found = []
    for device in (CPU, CUDA):
        keys, values = (torch.zeros(count, 40, width, dtype=dtype, device=device) for _ in range(2))
        own = None if gain is None else gain.to(device)
        query = layer.turn_and_write(
            heads.to(device), turns.to(device), slots.to(device), keys, values, queries, own, 1e-5
        )
        found.append([part.cpu().double() for part in (query, keys, values)])
    for expected, part in zip(*found, strict=True):
        assert float((expected - part).abs().max() / expected.abs().max()) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_gates_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    rows = torch.randn(5, 2 * 4864).to(dtype)
    expected = layer.gate(rows.double())
    found = layer.gate(rows.to(CUDA)).cpu().double()
    assert float((expected - found).abs().max() / expected.abs().max()) < CLOSE[dtype]


def law_of(weights: Tensor, ids: Tensor, size: int) -> Tensor:
    found = torch.zeros(len(ids), size, dtype=torch.float64)
    found.scatter_add_(1, ids, weights.double())
    return found / found.sum(1, keepdim=True)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("size", "spread"), [(5, 3.0), (2048, 3.0), (128_256, 5.0), (152_064, 0.1)]
)
@pytest.mark.parametrize("siblings", [1, 3])
def test_draws_are_those_of_operators(
    size: int, spread: float, siblings: int, dtype: torch.dtype
) -> None:
    """Rows are close to those of torch's operators; tokens are those of their integers."""
    torch.manual_seed(5)
    count = len(SAMPLINGS)
    logits = (spread * torch.randn(count + 1, size)).to(dtype)
    logits[2, 1 :: size // 5] = -torch.inf
    asked = drawn_from(torch.randperm(count).tolist(), size, SAMPLINGS, siblings)
    taken = torch.tensor([[1, -1]] * count if siblings > 1 else [[]] * count, dtype=torch.int64)
    expected = draws.draw(logits.float(), asked, taken, 0.99, 512, siblings)
    there = logits.to(CUDA), asked.to(CUDA), taken.to(CUDA)
    found = draws.draw(*there, 0.99, 512, siblings)
    assert torch.equal(found, draws.draw(*there, 0.99, 512, siblings))
    alone = [draws.draw(there[0], one[None], there[2][:1], 0.99, 512, siblings) for one in there[1]]
    assert torch.equal(found, torch.cat(alone)), "a row depends on others"
    found = found.cpu()
    _, rows = draws.parts_of(found, siblings)
    _, wanted = draws.parts_of(expected, siblings)
    assert (rows.weights[:, 0] == 65535).all()
    apart = law_of(rows.weights, rows.ids, size) - law_of(wanted.weights, wanted.ids, size)
    assert float(apart.abs().sum(1).max()) < 1e-3
    digits = asked[:, draws.DIGITS :].long()
    left = rows.weights.masked_fill((rows.ids[:, None] == taken[..., None]).any(1), 0)
    first = torch.where(left.sum(1) > 0, Categorical(rows.ids, left).draw(digits[:, :2]), 1)
    assert torch.equal(found[:, 0], first)


def test_rows_that_are_not_finite_have_no_weight() -> None:
    logits = torch.randn(4, 3000, device=CUDA)
    logits[0, 2999], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    asked = drawn_from(range(4), 3000, [Sampling()] * 4, 1).to(CUDA)
    found = draws.draw(logits, asked, torch.empty(4, 0, dtype=torch.int64, device=CUDA), 1.0, 16, 1)
    weights = draws.parts_of(found, 1)[1].weights.sum(1).tolist()
    assert weights[:3] == [0, 0, 0]
    assert weights[3]
    assert draws.laws(logits, asked)[:, 2].isnan().tolist() == [True, True, True, False]


TREE = Kind(tuple(place // 2 for place in range(64)))


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(("size", "width"), [(40, 16), (2048, 512), (128_256, 512)])
def test_verdicts_are_those_of_the_rules(rule: str, size: int, width: int) -> None:
    """But for a text in a hundred, whose numbers fall into what rounding moves."""
    same, places = 0, 0
    for seed in range(4):
        kinds = [*KINDS, CHAIN, *([TREE] if width > 64 else []), *KINDS]
        given = drafted(kinds, size, width, seed, SAMPLINGS)
        there = given.to("cuda")
        laws = draws.laws(there.logits, there.places)
        parts = laws, there.places, there.asked, there.rows
        found = verdicts.decide(there.logits, *parts, rule).cpu()
        assert torch.equal(found, verdicts.decide(there.logits, *parts, rule).cpu())
        expected = verdicts.decide(
            given.logits, laws.cpu(), given.places, given.asked, given.rows, rule
        )
        assert found.isfinite().all()
        assert float((found - expected)[:, verdicts.HEAD :].abs().max()) < 1e-4
        same += int((found[:, :2] == expected[:, :2]).all(1).sum())
        places += len(found)
    assert same >= places - 1 - places // 100
