"""Kernels in the instructions of GPUs that are not there: what keeps them fast is there, or not."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tandem.inference.batch.tiles import FEW, MANY, ONE
from tandem.kernels import attention, draws, layer, verdicts
from tests.support.devices.forest import Heads
from tests.unit.kernels.ahead_of_time import Compiled, Launch, launches

# What a program may take of a processor's shared memory, in KiB.
SHARED = {80: 99, 86: 99, 89: 99, 90: 227, 120: 99}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# Shapes that are served: query heads, key heads, numbers of a key, numbers of a value.
SHAPES: dict[str, tuple[torch.dtype, Heads, float]] = {
    "Llama-3-8B": (BFLOAT16, (32, 8, 128, 128), 0.0),
    "Qwen2.5-0.5B": (BFLOAT16, (14, 2, 64, 64), 0.0),
    "Gemma-2-9B": (BFLOAT16, (16, 8, 256, 256), 50.0),
    "Phi-3-mini": (BFLOAT16, (32, 32, 96, 96), 0.0),
    "float32": (FLOAT32, (32, 8, 128, 128), 0.0),
}
# Of a batch whose positions are split, and of one that has enough tiles without that.
TILES = {True: 1, False: 400}
MOST = pytest.mark.campaign(
    "kernels compile for five kinds of card and every served shape, and hardly spill",
    "one or two of each kind (this file); test_interpreted.py: what kernels compute",
)
# One of each kind, for the oldest GPU and the one that is measured; a campaign has all.
OFTEN = [(80, "Llama-3-8B", ONE, True), (90, "Llama-3-8B", FEW, False)]
ALL = list(itertools.product(SHARED, SHAPES, (ONE, FEW, MANY), TILES))
CASES = [*OFTEN, *(pytest.param(*c, marks=MOST) for c in ALL if c not in OFTEN)]
LAYERS = [80, *(pytest.param(sm, marks=MOST) for sm in SHARED if sm != 80)]


@pytest.fixture(autouse=True)
def _compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def like(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory; its address counts as aligned, as those of torch are."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attended(
    dtype: torch.dtype, heads: Heads, size: int, tiles: int, softcap: float = 0.0, **sizes: int
) -> Launch:
    """The launch of attention of a batch."""
    queries, count, width, value_width = heads
    rows, words = sizes.get("rows", size * tiles), sizes.get("words", 1)
    (launch,) = launches(
        lambda: attention._by_triton(
            like(dtype, rows, queries, width).transpose(0, 1),
            like(dtype, count, 4001, width),
            like(dtype, count, 4001, value_width),
            like(torch.int64, 6, tiles),
            like(torch.int64, 2 + words, rows),
            like(torch.int32, tiles, attention.COUNTED),
            size,
            words,
            0.1,
            softcap,
        )
    )
    return launch


def turned(dtype: torch.dtype, heads: Heads, rows: int, normed: bool) -> Launch:
    queries, count, width, _ = heads
    # As in a batch: the second of two rows of numbers, which begins where the first ends.
    slots = torch.zeros(2, rows, dtype=torch.int64)[1]
    (launch,) = launches(
        lambda: layer._turn_by_triton(
            like(dtype, rows, queries + 2 * count, width),
            like(FLOAT32, rows, 1, width // 2, 2),
            slots,
            like(dtype, count, 4001, width),
            like(dtype, count, 4001, width),
            queries,
            like(FLOAT32, queries + count, width) if normed else None,
            1e-6,
        )
    )
    return launch


def gated(dtype: torch.dtype, width: int, rows: int) -> Launch:
    (launch,) = launches(lambda: layer._gate_by_triton(like(dtype, rows, 2 * width)))
    return launch


def drawn(dtype: torch.dtype, vocab_size: int, rows: int, siblings: int = 1) -> list[Launch]:
    """The launches of draws with rows as wide as they are sent by default."""
    asked = like(torch.float64, rows, draws.DIGITS + 2 * siblings)
    taken = like(torch.int64, rows, siblings - 1)
    return launches(
        lambda: draws._draw_by_triton(
            like(dtype, rows, vocab_size), asked, taken, 0.99, 512, siblings
        )
    )


def decided(dtype: torch.dtype, vocab_size: int, texts: int, nodes: int) -> list[Launch]:
    """The launches of verdicts, and those of the laws before them."""
    places = like(torch.float64, texts * (nodes + 1), draws.DIGITS)
    logits = like(dtype, len(places), vocab_size)
    laws = like(torch.float64, len(places), draws.LAW)
    asked = like(torch.float64, texts, verdicts.UNIFORMS + 1 + 5 * nodes)
    rows = like(torch.int64, texts * nodes, 1 + 2 * 512)
    return [
        *launches(lambda: draws._laws_by_triton(logits, places)),
        *launches(lambda: verdicts._decide_by_triton(logits, laws, places, asked, rows, True)),
    ]


# Bytes of a thread's registers that attention may keep in memory, on some cards: four warps leave a
# few no room. Eight leave room for all, and took twice as long on an H100.
_SPILLED = 48
# Of draws and verdicts: a row is read by 512 threads, whose registers are all that there are.
_FEW_SPILLED = 24


def require_fast(found: Compiled, shared: int, spilled: int = 0) -> None:
    """Registers stay in registers, and a program fits a processor's shared memory."""
    assert found.stack <= spilled, str(found)
    assert found.spills * 2 <= spilled, str(found)
    assert found.shared <= shared * 1024, str(found)


@pytest.mark.parametrize(("capability", "shape", "size", "split"), CASES)
def test_attention_hardly_spills_and_loads_ahead(
    capability: int, shape: str, size: int, split: bool
) -> None:
    dtype, heads, softcap = SHAPES[shape]
    launch = attended(dtype, heads, size, TILES[split], softcap)
    assert launch.options["SPLIT"] == split
    found = launch.compiled(capability)
    require_fast(found, SHARED[capability], _SPILLED)
    assert found.instructions["LDGSTS"], "no block is loaded while another is computed"


@pytest.mark.parametrize("capability", LAYERS)
def test_small_kernels_spill_nothing(capability: int) -> None:
    launched = [turned(BFLOAT16, SHAPES["Llama-3-8B"][1], 4, True), gated(BFLOAT16, 14336, 4)]
    for launch in launched:
        require_fast(launch.compiled(capability), SHARED[capability])


def test_a_draw_and_a_verdict_hardly_spill() -> None:
    find, _ = drawn(BFLOAT16, 128_256, 16)
    _, judge, _ = decided(BFLOAT16, 128_256, 16, 4)
    for launch in (find, judge):
        require_fast(launch.compiled(80), SHARED[80], _FEW_SPILLED)


@MOST
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_all_kernels_of_draws_and_verdicts_hardly_spill(
    dtype: torch.dtype, capability: int
) -> None:
    for launch in (*drawn(dtype, 128_256, 16), *decided(dtype, 128_256, 16, 4)):
        require_fast(launch.compiled(capability), SHARED[capability], _FEW_SPILLED)


@MOST
def test_keys_whose_alignment_is_unknown_are_not_loaded_ahead() -> None:
    """A mutant: strides that are no multiples of 16 bytes."""
    launch = attended(BFLOAT16, (32, 8, 128, 128), FEW, 1)
    args = tuple(17 if isinstance(value, int) else value for value in launch.args)
    found = Launch(launch.kernel, args, launch.options).compiled(80)
    assert not found.instructions["LDGSTS"]


# A kernel for each number would be compiled while texts wait.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("split", TILES)
def test_numbers_of_a_batch_make_no_other_attention(shape: str, split: bool) -> None:
    dtype, heads, softcap = SHAPES[shape]
    keys = {
        attended(dtype, heads, FEW, tiles, softcap, rows=rows, words=words).key()
        for tiles in ((1, 2) if split else (400, 401, 416))
        for rows in (1, 15, 16, 17)
        for words in (1, 2, 16)
    }
    assert len(keys) == 1


def test_numbers_of_a_batch_make_no_other_small_kernels() -> None:
    heads = SHAPES["Llama-3-8B"][1]
    for normed in (False, True):
        assert len({turned(BFLOAT16, heads, n, normed).key() for n in (1, 2, 15, 16, 17)}) == 1
    assert len({gated(BFLOAT16, 14336, rows).key() for rows in (1, 2, 16, 17)}) == 1


def test_numbers_of_a_batch_make_no_other_draws_and_verdicts() -> None:
    """What a round has otherwise: texts, nodes, tokens that are taken."""
    assert len({drawn(BFLOAT16, 2048, rows)[0].key() for rows in (1, 2, 16, 17)}) == 1
    for place in range(3):
        shapes = ((1, 1), (2, 4), (16, 8), (17, 16))
        assert len({decided(BFLOAT16, 2048, *shape)[place].key() for shape in shapes}) == 1
