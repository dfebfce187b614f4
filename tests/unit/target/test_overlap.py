"""Layers that overlap in rounds without a draft: the law of the texts, which are those of whole
passes, and what is computed ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.drafting.decoders.model import ModelRecipe
from tandem.engine.asks import Steps, Truncation
from tandem.engine.job import Job
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.flight import Flight
from tandem.inference.loading.shared_layers import CYCLES, share_layers
from tandem.inference.output import PassOutput
from tandem.inference.passes import one_call
from tandem.inference.passes.overlapped import (
    ONE_PIPELINE,
    OverlappedPass,
    Pipelines,
    TwoPipelines,
)
from tandem.inference.views.overlapped import OverlappedDecoder
from tandem.speculation.request.log_probs import LogProbsWanted
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.overlap import Overlap
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence, open_
from target_svc.run import Credit, RunRound, run
from tests.support.decoders import decoder_over
from tests.support.jobs import play
from tests.support.laws.runs.answering import OtherToken
from tests.support.laws.runs.law import SEEN, TOLERANCE, RunLaw

VOCAB_SIZE, LAYERS, CACHE, ROUNDS = 24, 4, 1024, 40
PLAIN = DraftSize(0)
SAMPLINGS = (
    Sampling(seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_k=12, top_p=0.9, seed=2),
)
SIZES = {
    "plain": (PLAIN,),
    "drafts between": (PLAIN, PLAIN, DraftSize(1), PLAIN),
}


@pytest.mark.parametrize(
    ("groups", "guesses", "rule", "sizes", "log_probs"),
    [
        (2, 1, "block", "plain", True),
        (2, 2, "token", "plain", False),
        (3, 2, "token", "plain", True),
        (3, 1, "block", "plain", False),
        (2, 2, "block", "drafts between", False),
        (3, 1, "token", "drafts between", True),
    ],
)
def test_a_text_follows_the_law(
    groups: int, guesses: int, rule: str, sizes: str, log_probs: bool
) -> None:
    law = RunLaw("model", rule, SIZES[sizes], groups=groups, guesses=guesses, log_probs=log_probs)
    assert law.error() < TOLERANCE
    assert min(law.guessed.values()) > 5


def _any_guess(flight: Flight, cache: Any, token_id: int) -> list[int]:
    """The first guess counts as right."""
    if len(flight.tokens) > 1:
        flight.tokens[1].token_id = token_id
    return _GO_ON(flight, cache, token_id)


def _not_moved(flight: Flight, cache: Any, token_id: int) -> list[int]:
    """The rows of guesses that were wrong stay before the right one's."""
    before = cache.pool.move
    cache.pool.move = lambda slots, to: None
    try:
        return _GO_ON(flight, cache, token_id)
    finally:
        cache.pool.move = before


def _an_exit_decides(overlap: Overlap, *args: Any) -> Steps[Any]:
    """The row after the first group is the text's."""
    return _ROUND(replace(overlap, groups=overlap.groups - 1), *args)


_GO_ON, _ROUND = Flight.go_on, Overlap.round


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (Flight, "go_on", _any_guess),
        (Flight, "go_on", _not_moved),
        (Overlap, "round", _an_exit_decides),
    ],
)
def test_what_was_computed_for_another_token_is_seen(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(where, name, mutant)
    try:
        error = RunLaw("model", "token", (PLAIN,), groups=2, guesses=2).error()
    except OtherToken:
        return
    assert error > SEEN


def _llama(cycles: int = 1) -> PreTrainedModel:
    """A target whose upper layers change little, so that an exit is near it."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS // cycles,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    return _near(LlamaForCausalLM(config), cycles)


def _qwen3(cycles: int = 1) -> PreTrainedModel:
    """With norms of heads, and layers some of which see a window."""
    torch.manual_seed(4)
    layers = LAYERS // cycles
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.4,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=(["full_attention", "sliding_attention"] * layers)[:layers],
    )
    return _near(Qwen3ForCausalLM(config), cycles)


def _near(model: Any, cycles: int) -> PreTrainedModel:
    with torch.no_grad():
        for layer in model.model.layers[-(LAYERS // cycles) // 2 :]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    if cycles > 1:
        setattr(model.config, CYCLES, cycles)
        share_layers(model)
    found: PreTrainedModel = model
    return found


@pytest.fixture(scope="module")
def decoders() -> Callable[[str, int], Decoder]:
    made: dict[tuple[str, int], Decoder] = {}

    def decoder(kind: str, cycles: int) -> Decoder:
        key = kind, cycles
        if key not in made:
            model = {"llama": _llama, "qwen3": _qwen3}[kind](cycles)
            made[key] = decoder_over(model, kind, cache_tokens=CACHE, engine="torch", trees=True)
        return made[key]

    return decoder


@torch.inference_mode()
def texts(
    decoder: Decoder,
    overlap: Overlap | None,
    *,
    samplings: Sequence[Sampling] = SAMPLINGS,
    drafted: Sequence[int] = (),
    rounds: int = ROUNDS,
    new: int = 60,
    held: int | None = None,
    **asked: Any,
) -> list[list[RunRound]]:
    """Rounds of texts, each of which fills its extent of the pool; those that are `drafted` have
    drafts of a copy."""
    own = None
    if drafted:
        made = ModelRecipe().make([decoder], Truncation(0.999, 0))
        own = OwnDrafts(made, target_pb2.TargetDrafts(), VOCAB_SIZE)
    jobs: list[Job[Any]] = []
    for i, sampling in enumerate(samplings):
        prompt = [1 + i, *range(3 + i)]
        request = TargetRequest(sampling, VERIFIERS["block"], end=len(prompt) + new, **asked)
        drafting = OwnDrafting(list(prompt)) if drafted else None
        sequence = TargetSequence(prompt, request, own=drafting)
        room = len(prompt) + new
        sequence.caches = [decoder.reserve(room, held=held) for _ in range(1 + bool(drafted))]
        jobs.append(Job(sequence, _rounds(decoder, sequence, own, overlap, drafted, rounds)))
    play(jobs)
    for job in jobs:
        for cache in job.sequence.caches:
            decoder.release(cache)
        assert job.error is None, job.error
    return [[each.result for each in job.reports] for job in jobs]


def _rounds(
    scorer: Any,
    sequence: TargetSequence,
    own: OwnDrafts | None,
    overlap: Overlap | None,
    drafted: Sequence[int],
    rounds: int,
) -> Steps[None]:
    yield from open_(scorer, sequence, 0)
    credit = Credit(0)
    for number in range(1, rounds + 1):
        credit.grant(1, DraftSize(2) if number in drafted else PLAIN)
    yield from run(scorer, sequence, credit, own, overlap)


def emitted(rounds: Sequence[RunRound]) -> list[int]:
    return [token for one in rounds for token in one.decision.emitted]


class Kept:
    """A scorer that keeps the rows of tokens that have gone through all layers."""

    def __init__(self, scorer: OverlappedDecoder) -> None:
        self._scorer, self.vocab_size, self.chains = scorer, scorer.vocab_size, False
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.passes, self.guesses = 0, 0

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        output = self._scorer.forward(feeds)
        self.passes += 1
        first = 0
        for feed in feeds:
            assert feed.flight is not None
            if feed.flight[0].through == self._scorer.groups:
                rows = self.rows.setdefault(feed.cache.start, [])
                rows.append(output.logits[first].clone())
            self.guesses = max(self.guesses, len(feed.flight) - 1)
            first += len(feed.flight)
        return output

    def draw_on(self, feeds: Any, asked: Any) -> None:
        return None


WAYS = [
    ("llama", 1, 1, 1),
    ("llama", 1, 3, 1),
    ("llama", 1, 3, 2),
    ("llama", 4, 1, 1),
    ("qwen3", 1, 2, 1),
    ("qwen3", 2, 1, 1),
]


def overlap_of(
    decoder: Decoder, cycles: int, guesses: int, pipelines: int, exit_: int = 2
) -> tuple[Overlap, Kept, list[bool]]:
    how: Pipelines = ONE_PIPELINE if pipelines == 1 else TwoPipelines(2)
    scorer = OverlappedDecoder(decoder, exit_ if cycles == 1 else 0, guesses, how)
    kept, found = Kept(scorer), list[bool]()
    return Overlap(kept, scorer.groups, scorer.exit, guesses, found.append), kept, found


@pytest.mark.parametrize(("kind", "cycles", "guesses", "pipelines"), WAYS)
@pytest.mark.parametrize("drafted", [(), (3, 4, 9)])
def test_texts_are_those_of_whole_passes(
    decoders: Any, kind: str, cycles: int, guesses: int, pipelines: int, drafted: Sequence[int]
) -> None:
    decoder = decoders(kind, cycles)
    overlap, kept, found = overlap_of(decoder, cycles, guesses, pipelines)
    there = texts(decoder, None, drafted=drafted)
    here = texts(decoder, overlap, drafted=drafted)
    assert [emitted(text) for text in here] == [emitted(text) for text in there]
    assert 0 < sum(found) < len(found)
    assert kept.guesses >= guesses


@pytest.mark.parametrize(("kind", "cycles", "guesses", "pipelines"), WAYS)
def test_rows_are_those_of_whole_passes(
    decoders: Any, kind: str, cycles: int, guesses: int, pipelines: int
) -> None:
    decoder = decoders(kind, cycles)
    overlap, kept, _ = overlap_of(decoder, cycles, guesses, pipelines)
    (text,) = texts(decoder, overlap, samplings=SAMPLINGS[:1])
    (rows,) = kept.rows.values()
    prompt = [1, 0, 1, 2]
    fed = [*prompt, *_first(decoder, prompt), *emitted(text)]
    cache = decoder.reserve(len(fed))
    with torch.inference_mode():
        plain = decoder.forward([Feed(cache, fed[:-1], len(fed) - 1)]).logits
    decoder.release(cache)
    assert len(rows) == ROUNDS
    assert torch.allclose(torch.stack(rows), plain[-len(rows) :], atol=1e-4, rtol=1e-4)


def _first(decoder: Decoder, prompt: Sequence[int]) -> list[int]:
    """What the prompt's own round emits."""
    request = TargetRequest(SAMPLINGS[0], VERIFIERS["block"], end=len(prompt) + 1)
    sequence = TargetSequence(list(prompt[:4]), request)
    sequence.caches = [decoder.reserve(len(prompt) + 1)]
    job: Job[Any] = Job(sequence, open_(decoder, sequence, 0))
    with torch.inference_mode():
        play([job])
    decoder.release(sequence.caches[0])
    return [sequence.last_token]


def test_right_guesses_save_passes(decoders: Any) -> None:
    """Each token takes as many passes as it has groups left."""
    for cycles in (1, 4):
        decoder = decoders("llama", cycles)
        overlap, kept, found = overlap_of(decoder, cycles, 1, 1)
        texts(decoder, overlap, samplings=SAMPLINGS[:1])
        if cycles == 1:
            assert kept.passes == 2 * ROUNDS - sum(found[:-1])
        assert kept.passes < overlap.groups * ROUNDS


@pytest.mark.parametrize(("exit_", "groups", "guess"), [(1, 2, 1), (2, 2, 1), (3, 3, 2)])
def test_lower_layers_are_two_groups_where_they_are_more_than_the_upper_ones(
    decoders: Any, exit_: int, groups: int, guess: int
) -> None:
    decoder = decoders("llama", 1)
    overlap, kept, found = overlap_of(decoder, 1, 2, 1, exit_)
    assert (overlap.groups, overlap.exit) == (groups, guess)
    there, here = (texts(decoder, one, samplings=SAMPLINGS[:1]) for one in (None, overlap))
    assert emitted(here[0]) == emitted(there[0])
    # A right guess has gone through the first group.
    assert kept.passes == groups * ROUNDS - sum(found[:-1])


def test_a_text_that_fills_its_room_has_no_guess_too_many(decoders: Any) -> None:
    decoder = decoders("llama", 1)
    overlap, *_ = overlap_of(decoder, 1, 3, 1)
    there, here = (texts(decoder, one, rounds=20, new=12) for one in (None, overlap))
    assert [emitted(text) for text in here] == [emitted(text) for text in there]
    assert all(text[-1].ended for text in here)


@pytest.mark.parametrize("cycles", [1, 4])
def test_log_probabilities_are_those_of_whole_passes(decoders: Any, cycles: int) -> None:
    decoder = decoders("llama", cycles)
    overlap, *_ = overlap_of(decoder, cycles, 1, 1)
    wanted = LogProbsWanted(top=2)
    there, here = (texts(decoder, one, log_probs=wanted) for one in (None, overlap))
    for one, other in zip(there, here, strict=True):
        for plain, own in zip(one, other, strict=True):
            (first,), (second,) = plain.decision.log_probs, own.decision.log_probs
            assert first.value == pytest.approx(second.value, abs=1e-4)
            assert [token for token, _ in first.top] == [token for token, _ in second.top]


def test_no_token_is_guessed_behind_an_end(decoders: Any) -> None:
    decoder = decoders("llama", 4)
    overlap, kept, _ = overlap_of(decoder, 4, 1, 1)
    ends = frozenset(range(VOCAB_SIZE))
    texts(decoder, overlap, end_token_ids=ends)
    # The guess itself, and nothing after it.
    assert kept.guesses == 1


class Moved:
    """A scorer whose texts may be moved to another place before each pass."""

    def __init__(self, scorer: OverlappedDecoder) -> None:
        self._scorer, self.vocab_size, self.chains = scorer, scorer.vocab_size, False
        self.moves = 0

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        for feed in feeds:
            before = feed.cache.start
            wanted = min(feed.cache.used + len(feed.token_ids), feed.cache.promised)
            assert wanted <= feed.cache.capacity or feed.cache.pool.grow(feed.cache, wanted)
            self.moves += feed.cache.start != before and len(feed.flight or ()) > 1
        return self._scorer.forward(feeds)

    def draw_on(self, feeds: Any, asked: Any) -> None:
        return None


@pytest.mark.parametrize("cycles", [1, 4])
def test_a_text_may_move_while_its_tokens_are_in_flight(decoders: Any, cycles: int) -> None:
    decoder = decoders("llama", cycles)
    overlap, *_ = overlap_of(decoder, cycles, 3 if cycles == 1 else 1, 1)
    scorer = Moved(OverlappedDecoder(decoder, 2 if cycles == 1 else 0, overlap.guesses))
    there = texts(decoder, None, samplings=SAMPLINGS * 2, salt="all")
    moving = replace(overlap, scorer=scorer)
    here = texts(decoder, moving, samplings=SAMPLINGS * 2, salt="all", held=12)
    assert [emitted(text) for text in here] == [emitted(text) for text in there]
    assert scorer.moves


@pytest.mark.parametrize(("kind", "cycles"), [("llama", 1), ("qwen3", 2)])
def test_texts_are_the_same_where_attention_is_one_call(
    monkeypatch: pytest.MonkeyPatch, kind: str, cycles: int
) -> None:
    monkeypatch.setattr(one_call, "worthwhile", lambda device: True)
    monkeypatch.setattr(one_call, "_compile", lambda *others: None)
    model = {"llama": _llama, "qwen3": _qwen3}[kind](cycles)
    decoder = decoder_over(model, kind, cache_tokens=CACHE, engine="torch", trees=True)
    assert decoder.backend.in_one_call
    overlap, *_ = overlap_of(decoder, cycles, 3 if cycles == 1 else 1, 1)
    there, here = (texts(decoder, one) for one in (None, overlap))
    assert [emitted(text) for text in here] == [emitted(text) for text in there]


def test_rows_that_differ_are_refused(decoders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OverlappedPass.forward

    def wrong(self: OverlappedPass, feeds: Sequence[Feed]) -> PassOutput:
        output = own(self, feeds)
        return PassOutput(output.logits.roll(1, -1))

    monkeypatch.setattr(OverlappedPass, "forward", wrong)
    with pytest.raises(StartupError, match="by groups of layers differ by"):
        OverlappedDecoder(decoders("llama", 1), 2)


def test_ids_that_are_never_drawn_are_none_here_either(
    decoders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoders("llama", 1)
    monkeypatch.setattr(decoder, "about", replace(decoder.about, masked_ids=[3, 9]))
    monkeypatch.setattr(decoder, "_masked", decoder.masked)
    overlap, *_ = overlap_of(decoder, 1, 2, 1)
    there, here = (texts(decoder, one) for one in (None, overlap))
    assert [emitted(text) for text in here] == [emitted(text) for text in there]
    assert not {3, 9} & {token for text in here for token in emitted(text)}


def test_one_guess_alone_where_no_branches_are_taken(
    decoders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoders("llama", 1)
    monkeypatch.setattr(decoder.backend, "takes_trees", False)
    with pytest.raises(StartupError, match="takes no branches here"):
        OverlappedDecoder(decoder, 2, 2)
    OverlappedDecoder(decoder, 2, 1)


def test_an_exit_without_a_row_ends_no_text(decoders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoders("llama", 1)
    overlap, kept, found = overlap_of(decoder, 1, 2, 1)
    own = kept.forward

    def broken(feeds: Sequence[Feed]) -> PassOutput:
        output = own(feeds)
        through = [one.through for feed in feeds for one in feed.flight or ()]
        output.logits[torch.tensor(through) == 1] = torch.nan
        return output

    there = texts(decoder, None)
    monkeypatch.setattr(kept, "forward", broken)
    here = texts(decoder, overlap)
    assert [emitted(text) for text in here] == [emitted(text) for text in there]
    assert not any(found)


def test_a_failure_of_the_other_pipeline_is_told() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no memory")

    pipelines = TwoPipelines(3)
    with pytest.raises(RuntimeError, match="no memory"):
        pipelines.run({0: fail, 1: lambda: torch.zeros(1)})
    one, other = pipelines.run({0: lambda: torch.ones(1), 1: lambda: torch.zeros(1)})
    assert (float(one), float(other)) == (1.0, 0.0)
