"""Chains that are drawn in one replay are those that are drawn token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from tandem.drafting.ahead.prepare import Ahead, AheadDraft
from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.drafter import DraftSequence, go_on
from tandem.engine.asks import Truncation
from tandem.engine.stepper import Stepper
from tandem.errors import Unsupported
from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import ONE, WORDS, Tiles, TileSizes, one_row_each
from tandem.inference.decoder import Decoder
from tandem.inference.description import describe
from tandem.inference.loading.checkpoint import LoadedCheckpoint
from tandem.inference.passes import chains, one_call
from tandem.inference.passes import cuda_graphs as graph
from tandem.inference.passes.backend import Backend
from tandem.inference.passes.backends import Backends
from tandem.speculation.draft import Draft
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tests.support.decoders import decoder_over
from tests.support.devices.by_operators import by_operators
from tests.support.devices.recording import Recorder
from tests.support.models.architectures import SUPPORTED, build
from tests.unit.inference.passes.fake_device import run

CUT = 0.99, 16
LONGEST = 60
SAMPLINGS = [
    Sampling(seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_p=0.9, seed=2),
    Sampling(temperature=1.5, top_k=7, min_p=0.02, seed=3),
    Sampling(seed=4),
]


@contextmanager
def captured(name: str) -> Iterator[tuple[Decoder, Decoder, Recorder]]:
    """A model whose chains are captured, and the same without captured passes."""
    recorder = Recorder()
    row = next(row for row in SUPPORTED if row.model_type == name)
    with pytest.MonkeyPatch.context() as patch, by_operators():
        patch.setattr(one_call, "worthwhile", lambda _: True)
        patch.setattr(graph, "capture", recorder)
        patch.setattr(chains, "_ROWS", (1, 2, 8))
        options: dict[str, Any] = {"cache_tokens": 800, "longest": LONGEST, "trees": True}
        own = decoder_over(build(row), "tiny", graph_rows=8, chains=CUT, **options)
        bare = decoder_over(build(row), "tiny", **options)
        yield own, bare, recorder


@pytest.fixture(scope="module")
def of_llama() -> Iterator[tuple[Decoder, Decoder, Recorder]]:
    """For all tests, which leave its passes and its room as they were."""
    with captured("llama") as decoders:
        yield decoders


def opened(decoder: Decoder, samplings: Sequence[Sampling]) -> list[DraftSequence]:
    sequences = [
        DraftSequence([3 + i] * (2 + 3 * i), sampling, decoder.vocab_size - 3 * i)
        for i, sampling in enumerate(samplings)
    ]
    for sequence in sequences:
        cache = decoder.reserve(LONGEST)
        assert cache is not None
        sequence.caches.append(cache)
    return sequences


@torch.inference_mode()
def drafts(
    decoder: Decoder, samplings: Sequence[Sampling], gammas: Sequence[Sequence[int]]
) -> list[Draft]:
    """Of each text, round by round; some of the tokens are kept."""
    drafter, stepper = ModelDrafter(decoder, Truncation(*CUT)), Stepper(decoder.device)
    sequences = opened(decoder, samplings)
    run(stepper, sequences, drafter.open)
    found: list[Draft] = []
    emitted = {id(one): [5] for one in sequences}
    for round_, sizes in enumerate(gammas, 1):
        size = {id(one): DraftSize(each, 0) for one, each in zip(sequences, sizes, strict=True)}

        def begin(one: DraftSequence, round_: int = round_, size: Any = size) -> Any:
            return go_on(drafter, one, round_, emitted[id(one)], size[id(one)])

        drafted: list[Draft] = run(stepper, sequences, begin)
        found += drafted
        for number, (one, draft) in enumerate(zip(sequences, drafted, strict=True)):
            kept = (round_ + number) % (len(draft) + 1)
            emitted[id(one)] = [*draft.token_ids[:kept], 7]
    for sequence in sequences:
        assert sequence.caches[0].length <= LONGEST
        decoder.release(sequence.caches[0])
    return found


def same(ours: Sequence[Draft], theirs: Sequence[Draft]) -> bool:
    """Of equal tokens; weights are of float32 rows, whose last bits hang on the batch."""
    told = [
        [(one.token_ids, one.sizes, one.ids.tolist()) for one in each] for each in (ours, theirs)
    ]
    weights = [np.concatenate([one.weights for one in each]).astype(int) for each in (ours, theirs)]
    return told[0] == told[1] and bool((abs(weights[0] - weights[1]) < 3).all())


def test_drafts_are_those_that_are_drawn_token_by_token(
    of_llama: tuple[Decoder, Decoder, Recorder],
) -> None:
    require_the_same_drafts(*of_llama)


@pytest.mark.campaign(
    "chains of a model with windows draw what is drawn token by token",
    "chains of one without; what each step of a chain sees, by windows (this file)",
)
def test_drafts_of_layers_with_windows_are_too() -> None:
    with captured("gemma2") as decoders:
        require_the_same_drafts(*decoders)


def require_the_same_drafts(own: Decoder, bare: Decoder, recorder: Recorder) -> None:
    """Several texts and one, drafts of all sizes, and of several at once."""
    together = [[4] * 5, [8] * 5, [3] * 5, [2, 4, 8, 1, 5]]
    before = recorder.replays
    for samplings, gammas in (
        (SAMPLINGS, together),
        (SAMPLINGS[:1], [[4], [6], [1], [9]]),
        (SAMPLINGS[1:2], [[4], [2]]),
    ):
        expected = drafts(bare, samplings, gammas)
        assert same(drafts(own, samplings, gammas), expected)
        assert len({tuple(draft.token_ids) for draft in expected}) > 1
    assert recorder.replays > before


def test_a_draft_takes_one_replay_behind_its_first_token(
    of_llama: tuple[Decoder, Decoder, Recorder],
) -> None:
    own, _, recorder = of_llama
    for gamma, replays in ((1, 0), (2, 1), (4, 1), (8, 1), (5, 2)):
        passes = own.forward_passes, recorder.replays
        drafts(own, SAMPLINGS, [[gamma] * 5])
        # A prompt is one pass, by a captured one or not; so is the first token.
        prompts = recorder.replays - passes[1] - replays
        assert 1 <= prompts <= 2
        assert own.forward_passes - passes[0] == 1 + gamma


@torch.inference_mode()
@pytest.mark.parametrize("likely", [True, False])
def test_drafts_that_are_prepared_are_drawn_token_by_token(
    of_llama: tuple[Decoder, Decoder, Recorder], likely: bool
) -> None:
    """They stand on branches; the chain of the text itself goes on in one replay."""
    found = []
    for decoder in of_llama[:2]:
        drafter, stepper = ModelDrafter(decoder, Truncation(*CUT)), Stepper(decoder.device)
        sequence = DraftSequence([3, 4, 5], SAMPLINGS[0], decoder.vocab_size, nodes=120)
        cache = decoder.reserve(LONGEST + 120, 120)
        assert cache is not None
        sequence.caches.append(cache)
        run(stepper, [sequence], drafter.open)
        ahead, size = Ahead(drafter, sequence, LONGEST), DraftSize(4)

        def draft(
            emitted: list[int], round_: int, ahead: Ahead = ahead, size: DraftSize = size
        ) -> Any:
            return lambda _: ahead.go_on(round_, emitted, size, ())

        first: AheadDraft = run(stepper, [sequence], draft([6], 1))[0]

        def prepare(_: object, ahead: Ahead = ahead, made: AheadDraft = first) -> Any:
            return ahead.prepare(1, made.draft, DraftSize(4), 40)

        run(stepper, [sequence], prepare)
        outcomes = [list(tokens) for tokens, _ in ahead.ready]
        assert len(outcomes) > 3
        emitted = outcomes[0] if likely else [first.draft.token_ids[0], 1]
        second: AheadDraft = run(stepper, [sequence], draft(emitted, 2))[0]
        assert (second.outcome is PreparedOutcome.HIT) == (emitted in outcomes)
        found.append((first.draft.token_ids, outcomes, second.draft.token_ids))
        decoder.release(cache)
    assert found[0] == found[1]


def test_what_does_not_fit_is_drawn_token_by_token(
    of_llama: tuple[Decoder, Decoder, Recorder],
) -> None:
    """More texts than are captured; and the end of a text that is as long as may be."""
    own, bare, _ = of_llama
    many = [replace(SAMPLINGS[0], seed=i) for i in range(11)]
    for samplings, gammas in ((many, [[3] * 11]), (SAMPLINGS[:1], [[8]] * 6)):
        assert same(drafts(own, samplings, gammas), drafts(bare, samplings, gammas))


@pytest.fixture
def without_chains(
    of_llama: tuple[Decoder, Decoder, Recorder], monkeypatch: pytest.MonkeyPatch
) -> Backend:
    """Its passes are captured, and no chains yet."""
    backend = of_llama[0]._backends.current
    assert backend.chains is not None
    monkeypatch.setattr(backend, "chains", None)
    return backend


@torch.inference_mode()
def test_without_room_for_them_chains_are_not_captured(
    without_chains: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert graph.capture_chains(without_chains, 8, LONGEST, (0.99, 0)) == ""
    assert without_chains.chains is None
    monkeypatch.setattr(graph, "capture", lambda *_: 1 / 0)
    assert graph.capture_chains(without_chains, 8, LONGEST, CUT).startswith("ZeroDivisionError")
    assert without_chains.chains is None


def test_new_weights_have_captured_chains_or_are_not_taken(
    of_llama: tuple[Decoder, Decoder, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, bare, recorder = of_llama
    row = next(row for row in SUPPORTED if row.model_type == "llama")

    def read() -> LoadedCheckpoint:
        model = build(row)
        return LoadedCheckpoint(model, replace(describe(model, "tiny"), weights_version=1))

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_backends", Backends(decoder.backend))
        patch.setattr(decoder, "about", decoder.about)
        before, recordings = decoder.backend.chains, len(recorder.recordings)
        decoder.renewed(read)()
        assert decoder.backend.chains not in (None, before)
        own = recorder.recordings[recordings:]
        assert same(drafts(decoder, SAMPLINGS, [[3] * 5]), drafts(bare, SAMPLINGS, [[3] * 5]))
        assert any(recording.replays for recording in own)

    def fail(*_: Any) -> None:
        raise Unsupported("drawn from another row")

    monkeypatch.setattr(graph, "_check_chains", fail)
    with (
        capture_logs() as logs,
        pytest.raises(MemoryError, match="cannot be captured: Unsupported: drawn from another row"),
    ):
        decoder.renewed(read)
    assert not [line for line in logs if line["log_level"] == "warning"]


def test_a_start_without_captured_chains_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_check_chains", lambda *_: 1 / 0)
    with capture_logs() as logs, captured("llama") as (decoder, _, _):
        assert decoder.backend.graphs is not None
    (log,) = [line for line in logs if line["log_level"] == "warning"]
    assert log["event"] == "each token of a draft takes a pass of its own"
    assert log["reason"].startswith("ZeroDivisionError")


@torch.inference_mode()
@pytest.mark.parametrize(
    "wrong", ["another text's", "of the step before", "no number", "another number"]
)
def test_chains_that_draw_from_other_rows_are_not_used(
    without_chains: Backend, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    computed = chains.ChainGraph.__call__

    def drawn(self: chains.ChainGraph, *given: Any) -> torch.Tensor:
        found = computed(self, *given)
        if wrong == "another text's":
            return found.roll(1, 1)
        if wrong == "of the step before":
            found[1:] = found[:-1].clone()
            return found
        if wrong == "another number":
            found[-1, :, 0] = found[-1, :, 16]  # the least likely token of the row
            return found
        found[:, -1:, -16:] = 0
        return found

    monkeypatch.setattr(chains.ChainGraph, "__call__", drawn)
    why = graph.capture_chains(without_chains, 8, LONGEST, CUT)
    by = "by another number" if wrong == "another number" else "from another row"
    assert f"of a chain is drawn {by}" in why
    assert without_chains.chains is None


@pytest.mark.parametrize("windows", [(None,), (4, None), (3,)])
def test_what_steps_see_is_what_each_batch_would_send(windows: Sequence[int | None]) -> None:
    room, scratch = TileSizes(8, 8, ONE, WORDS), 999
    starts, lengths, steps = [40, 0, 100], [9, 1, 2], 5
    found = one_row_each(starts, lengths, room, windows, steps, scratch)
    for step in range(steps):
        segments = [
            Segment(row, 1, start, length + step + 1)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        places = np.zeros((2, room.rows), np.int64)
        places[1] = scratch
        places[0, :3] = [length + step for length in lengths]
        places[1, :3] = [
            start + length + step for start, length in zip(starts, lengths, strict=True)
        ]
        tiles = Tiles(segments, torch.device("cpu"), room, windows, places)
        assert tiles._sent._flat.tolist() == found[step].tolist()
