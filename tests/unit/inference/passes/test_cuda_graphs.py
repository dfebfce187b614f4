"""Captured passes give the logits of the plain pass, batch after batch in the same memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import FEW, ONE, Tiles, TileSizes
from tandem.inference.decoder import Decoder
from tandem.inference.description import describe
from tandem.inference.feed import DrawnToken, Draws, Feed
from tandem.inference.kv.pool import SequenceCache
from tandem.inference.loading.checkpoint import LoadedCheckpoint
from tandem.inference.output import PassOutput
from tandem.inference.passes import cuda_graphs as graph
from tandem.inference.passes import one_call, torch_llama
from tandem.inference.passes.cuda_graphs import Graph, _pairs, rooms
from tests.support.decoders import decoder_over
from tests.support.devices.recording import Recorder
from tests.support.models.architectures import SUPPORTED, Architecture, build

ROWS, LONGEST = 32, 80
STEPS = 10
# Of float32, for batches of other sizes: 1.2e-5 on one processor, less on others. A wrong row is
# off by a hundredth at least.
NOISE = 3e-5
# Plain lists of operators, and passes of transformers' modules: windows, soft caps, heads.
NAMES = ("llama", "mistral", "qwen3", "gemma2", "gpt2")
ARCHITECTURES = [row for row in SUPPORTED if row.model_type in NAMES]
# One layer shows what two alike would; the others' two have a window or none.
ALIKE = ("llama", "mistral", "gpt2")


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    """A device that captures, as far as it can be had on a CPU."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_call, "worthwhile", lambda _: True)
        patch.setattr(graph, "capture", recorder)
        yield recorder


@pytest.fixture(scope="module")
def pair(recorder: Recorder) -> list[Decoder]:
    """Of the first architecture, for tests that change no more of it than what texts hold."""
    return pair_of(ARCHITECTURES[0])


def pair_of(row: Architecture) -> list[Decoder]:
    """The same model with graphs and without; some give hidden states."""
    options = {"num_hidden_layers": 1} if row.model_type in ALIKE else {}
    states_of = "none" if row.model_type in ALIKE else "1,last"
    return [
        decoder_over(
            build(row, **options),
            "tiny",
            cache_tokens=50 * 16,
            graph_rows=rows,
            longest=LONGEST,
            states_of=states_of,
        )
        for rows in (ROWS, 0)
    ]


@contextmanager
def reserved(decoder: Decoder, count: int, longest: int = LONGEST) -> Iterator[list[SequenceCache]]:
    """Caches of as many texts, or of as many as there is room for."""
    caches = [cache for cache in (decoder.reserve(longest) for _ in range(count)) if cache]
    try:
        yield caches
    finally:
        for cache in caches:
            decoder.release(cache)


def serve(decoders: list[Decoder], rng: random.Random, steps: int = STEPS) -> float:
    """Random batches of nine texts, with rollbacks; the largest difference of a logit, or of a
    hidden state."""
    with reserved(decoders[0], 9) as captured, reserved(decoders[1], 9) as plain:
        return difference(decoders, [captured, plain], rng, steps)


def difference(
    decoders: list[Decoder], caches: list[list[SequenceCache]], rng: random.Random, steps: int
) -> float:
    prompts = [[(i + n) % 60 for n in range(rng.randint(1, LONGEST - 1))] for i in range(9)]
    for decoder, own in zip(decoders, caches, strict=True):
        for cache, prompt in zip(own, prompts, strict=True):
            decoder.forward([Feed(cache, prompt, 0)])
    worst = 0.0
    for _ in range(steps):
        chosen = rng.sample(range(9), rng.choice((1, 1, 2, 3, 9)))
        counts = [rng.choice((1, 1, 1, 2, 5, FEW, FEW + 1)) for _ in chosen]
        wanted = [rng.randint(0, count) for count in counts]
        wanted[-1] = counts[-1]
        told = [rng.randint(0, count) if decoders[0].about.of_layers else 0 for count in counts]
        lengths = [caches[0][i].length - rng.randint(0, 5) for i in chosen]
        found = []
        for decoder, own in zip(decoders, caches, strict=True):
            feeds = []
            for i, count, rows, length, states in zip(
                chosen, counts, wanted, lengths, told, strict=True
            ):
                own[i].rollback(max(0, min(length, LONGEST - count)))
                tokens = [(i * 7 + n) % 60 for n in range(count)]
                feeds.append(Feed(own[i], tokens, rows, states=states))
            found.append(decoder.forward(feeds))
        for ours, theirs in _pairs(*found):
            worst = max(worst, float((ours - theirs).abs().max()))
        assert (found[0].states is None) == (found[1].states is None) == (not any(told))
    return worst


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.model_type)
@torch.inference_mode()
def test_replayed_passes_give_the_logits_of_plain_ones(
    row: Architecture, recorder: Recorder
) -> None:
    before = len(recorder.recordings)
    decoders = pair_of(row)
    at_start = recorder.replays
    assert len(recorder.recordings) == before + len(rooms(ROWS))
    assert serve(decoders, random.Random(1)) < NOISE
    assert recorder.replays > at_start + STEPS / 2


@torch.inference_mode()
def test_drawn_tokens_reach_a_graph_without_the_host(pair: list[Decoder]) -> None:
    logits = []
    for decoder in pair:
        with reserved(decoder, 2) as caches:
            draws = Draws(torch.tensor([5, 3]), None)  # type: ignore[arg-type]
            decoder.forward([Feed(cache, [1, 2], 1) for cache in caches])
            feeds = [Feed(cache, DrawnToken(draws, 1 - i), 1) for i, cache in enumerate(caches)]
            logits.append(decoder.forward(feeds).logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-5)


@torch.inference_mode()
def test_a_result_outlives_the_next_pass(pair: list[Decoder]) -> None:
    decoder, _ = pair
    with reserved(decoder, 1) as (cache,):
        first = decoder.forward([Feed(cache, [1], 1)]).logits
        kept = first.clone()
        decoder.forward([Feed(cache, [2], 1)])
        assert torch.equal(first, kept)


@torch.inference_mode()
def test_others_are_not_written_to(pair: list[Decoder]) -> None:
    """Spare rows go to a place of their own, whatever texts there are."""
    decoder, _ = pair
    with reserved(decoder, 51, 16) as caches:
        assert len(caches) == 50  # the scratch takes no text's place
        layers = [*decoder.pool.keys, *decoder.pool.values]
        for states in layers:
            states.fill_(7.0)
        first, *_, last = sorted(caches, key=lambda cache: cache.start)
        decoder.forward([Feed(first, [1, 2, 3], 1), Feed(last, [1, 2], 1)])
        for states in layers:
            assert bool((states[:, first.start + 16 : last.start] == 7.0).all())


def learnt(row: Architecture, version: int) -> LoadedCheckpoint:
    """The same model with other weights."""
    model = build(row, num_hidden_layers=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + version / 4)
    return LoadedCheckpoint(model, replace(describe(model, "tiny"), weights_version=version))


def following(decoder: Decoder, cache: SequenceCache) -> torch.Tensor:
    """Rows of three tokens after the first ones."""
    with torch.inference_mode():
        decoder.forward([Feed(cache, [5, 6, 7, 8], 0)])
        return decoder.forward([Feed(cache, [9, 10, 11], 3)]).logits


def test_new_weights_have_captured_passes_of_their_own(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open texts go on with those of the old ones, whose memory is not written to."""
    row = ARCHITECTURES[0]
    decoder, plain = pair_of(row)
    renewed = decoder_over(learnt(row, 1).model, "tiny", cache_tokens=50 * 16)
    expected = []
    for own in (plain, renewed):
        with reserved(own, 1) as (cache,):
            expected.append(following(own, cache))
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)
    with reserved(decoder, 1) as (old,):
        take = decoder.renewed(lambda: learnt(row, 1))
        graphs, replays = decoder.backend.graphs, recorder.replays
        take()
        assert decoder.backend.graphs not in (None, graphs)
        with reserved(decoder, 1) as (new,):
            assert (old.weights_version, new.weights_version) == (0, 1)
            for cache, rows in zip((old, new), expected, strict=True):
                assert torch.allclose(following(decoder, cache), rows, atol=NOISE)
            assert recorder.replays == replays + 4
        assert decoder._backends.num_earlier == 1
    assert decoder._backends.num_earlier == 0

    def refuse(run: Callable[[], None], *given: Any) -> Callable[[], None]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(graph, "capture", refuse)
    with (
        capture_logs() as logs,
        pytest.raises(MemoryError, match="cannot be captured: RuntimeError: CUDA error: out of"),
    ):
        decoder.renewed(lambda: learnt(row, 2))
    assert not [line for line in logs if line["log_level"] == "warning"]  # the old ones go on
    assert decoder.about.weights_version == 1
    with reserved(decoder, 1) as (new,):
        assert torch.allclose(following(decoder, new), expected[1], atol=NOISE)


@torch.inference_mode()
def test_the_start_holds_every_size_to_the_pass(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: set[TileSizes] = set()
    calling = Graph.__call__

    def call(self: Graph, packing: Any, feeds: Any) -> PassOutput:
        calls.add(self.room)
        return calling(self, packing, feeds)

    monkeypatch.setattr(Graph, "__call__", call)
    pair_of(ARCHITECTURES[0])
    assert calls == set(rooms(ROWS))


def test_sizes_hold_plain_decoding_and_verifications() -> None:
    found = [(room.rows, room.tiles, room.size) for room in rooms(8)]
    assert found == [(1, 1, ONE), (2, 2, ONE), (4, 1, FEW), (4, 4, ONE), (8, 2, FEW), (8, 8, ONE)]
    assert rooms(0) == []
    largest = rooms(512)[-1]
    assert largest.fit(512, 512, 128)
    assert not largest.fit(513, 1, 0)
    assert not largest.fit(1, 513, 0)
    assert not largest.fit(1, 1, 129), "more rows after a trunk than bits"


@torch.inference_mode()
def test_a_text_longer_than_promised_is_launched_and_others_are_replayed(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its rotations are computed for it: graphs go on reading those of before."""
    monkeypatch.setattr(torch_llama, "_FIRST_TURNS", LONGEST)
    long, short = [], []
    for decoder in pair_of(ARCHITECTURES[0]):
        caches = [decoder.reserve(length) for length in (LONGEST + 16, 16)]
        assert caches[0] is not None
        assert caches[1] is not None
        replays = recorder.replays
        decoder.forward([Feed(caches[0], [n % 60 for n in range(LONGEST)], 0)])
        long.append(decoder.forward([Feed(caches[0], [1], 1)]).logits)
        assert recorder.replays == replays
        short.append(decoder.forward([Feed(caches[1], [1, 2], 2)]).logits)
        assert recorder.replays == replays + (decoder._backends.current.graphs is not None)
    assert torch.allclose(long[0], long[1], atol=1e-5)
    assert torch.allclose(short[0], short[1], atol=1e-5)


def test_rounds_compile_nothing() -> None:
    """Trees, and prompts beside them, of changing shapes, by another thread than the start's: torch
    keeps what it has compiled for each thread."""
    decoder = pair_of(ARCHITECTURES[0])[1]
    rng = random.Random(4)

    @torch.inference_mode()
    def serve() -> None:
        with reserved(decoder, 9) as caches:
            for _ in range(200):
                feeds = []
                for cache in rng.sample(caches, rng.randint(1, 9)):
                    count = rng.choice((1, 2, 5, FEW + 1, LONGEST // 2))
                    cache.rollback(rng.randint(0, LONGEST - count))
                    parents = [rng.randint(0, i) for i in range(rng.randint(0, count))]
                    feeds.append(Feed(cache, [1] * count, 1, parents or None))
                decoder.forward(feeds)

    counters = torch._dynamo.utils.counters
    counters.clear()
    with ThreadPoolExecutor(1) as engine:
        engine.submit(serve).result()
    assert not counters["frames"]
    assert not counters["stats"]


@pytest.mark.parametrize("failing", ["capture", "replay"])
@torch.inference_mode()
def test_what_cannot_be_captured_is_one_warning(
    recorder: Recorder, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Callable[[], None], device: Any, memory: Any) -> Callable[[], None]:
        if failing == "capture":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand")
        return recorder(lambda: None, device, memory)  # which changes nothing

    monkeypatch.setattr(graph, "capture", refuse)
    with capture_logs() as logs:
        decoders = pair_of(ARCHITECTURES[0])
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert decoders[0].pool.free_positions == decoders[0].positions
    expected = (
        "RuntimeError: CUDA error" if failing == "capture" else "differs from the pass itself"
    )
    assert expected in warning["reason"]
    assert serve(decoders, random.Random(2), 5) == 0.0


@torch.inference_mode()
def test_the_largest_sizes_are_left_out_where_memory_is_short(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = Graph.__init__

    def make(self: Graph, **given: Any) -> None:
        if given["room"].rows > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        making(self, **given)

    whole = pair_of(ARCHITECTURES[0])[0]
    monkeypatch.setattr(Graph, "__init__", make)
    with capture_logs() as logs:
        decoders = pair_of(ARCHITECTURES[0])
    rows = [line["rows"] for line in logs if line["log_level"] == "warning"]
    assert rows == [32, 32, 16, 16]
    replays = recorder.replays
    assert serve(decoders, random.Random(3), 5) < NOISE
    assert recorder.replays > replays
    # New weights have all the sizes of those before, or are not taken.
    decoders[0].renewed(lambda: learnt(ARCHITECTURES[0], 1))
    with pytest.raises(MemoryError, match="cannot be captured: there is no room for all sizes"):
        whole.renewed(lambda: learnt(ARCHITECTURES[0], 1))


# Mutants: what stays as it was captured.


def stale_tiles(patch: pytest.MonkeyPatch) -> None:
    filling = Tiles.refill

    def refill(self: Tiles, segments: Any, beside: Any) -> None:
        filling(self, [Segment(0, 1, 0, 1)], beside)

    patch.setattr(Tiles, "refill", refill)


def stale_places(patch: pytest.MonkeyPatch) -> None:
    filling = Tiles.refill

    def refill(self: Tiles, segments: Any, beside: Any) -> None:
        filling(self, segments, self.beside.view(2, -1).numpy())

    patch.setattr(Tiles, "refill", refill)


def spare_rows_at_a_text(patch: pytest.MonkeyPatch) -> None:
    calling = Graph.__call__

    def call(self: Graph, packing: Any, feeds: Any) -> PassOutput:
        self._scratch = feeds[0].cache.start
        return calling(self, packing, feeds)

    patch.setattr(Graph, "__call__", call)


def too_few_tiles(patch: pytest.MonkeyPatch) -> None:
    making = graph.rooms

    def few(rows: int) -> list[TileSizes]:
        return [replace(room, tiles=max(1, room.tiles // 2)) for room in making(rows)]

    patch.setattr(graph, "rooms", few)
    patch.setattr(TileSizes, "fit", lambda self, rows, tiles, behind: rows <= self.rows)


AT_START = [too_few_tiles]
MUTANTS = [stale_tiles, stale_places, spare_rows_at_a_text, *AT_START]


@pytest.mark.parametrize("mutant", MUTANTS)
@torch.inference_mode()
def test_mutants_are_caught(
    pair: list[Decoder],
    mutant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert serve(pair, random.Random(2), 5) < NOISE  # the mutants before have left nothing
    monkeypatch.setattr(graph, "_check", lambda *_: None)  # which would find some at the start
    mutant(monkeypatch)
    try:
        started = pair_of(ARCHITECTURES[0]) if mutant in AT_START else pair
        worst = serve(started, random.Random(1))
    except (RuntimeError, ValueError, IndexError):
        return
    assert not worst < 1e-3
