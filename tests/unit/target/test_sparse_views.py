"""A target that drafts for itself over few keys of its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tandem.drafting.decoders.model import ModelRecipe
from tandem.drafting.drafter import Recipe
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Truncation
from tandem.engine.job import Job
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.sparse import STRIDE, KeyChoice, SparseCache
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.views.few_keys import SparseView
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence
from target_svc.run import RunRound
from tests.support.decoders import decoder_over
from tests.support.jobs import play
from tests.unit.target.test_views import _rounds

VOCAB_SIZE, WINDOW = 24, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
CHAIN, CASCADE = ModelRecipe(), METHODS["cascade"].model_validate({"tokens": 2})
SAMPLINGS = (Sampling(seed=1), Sampling(temperature=0.0))


@pytest.fixture(scope="module")
def target() -> Decoder:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    return decoder_over(model, "target", cache_tokens=4096, engine="torch")


@pytest.fixture(scope="module")
def windowed() -> Decoder:
    """A target whose own layers see eight keys."""
    torch.manual_seed(4)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW))
    return decoder_over(model, "windowed", cache_tokens=4096, engine="torch")


def texts(
    target: Decoder,
    keys: SparseKeys,
    recipe: Recipe = CHAIN,
    *,
    prompt: int = 100,
    rounds: int = 40,
    plain: Sequence[int] = (),
) -> tuple[list[list[RunRound]], SparseView]:
    view = SparseView(target, keys, len(SAMPLINGS))
    made = recipe.make([view], Truncation(1.0, 0))
    own = OwnDrafts(made, target_pb2.TargetDrafts(), VOCAB_SIZE)
    jobs = []
    for i, sampling in enumerate(SAMPLINGS):
        tokens = [(7 * n * n + 3 * n + i) % VOCAB_SIZE for n in range(prompt + i)]
        asked = TargetRequest(sampling, VERIFIERS["block"], end=len(tokens) + 400)
        sequence = TargetSequence(tokens, asked, own=OwnDrafting(list(tokens)))
        sequence.caches = [target.reserve(prompt + 410), view.reserve(prompt + 410)]
        steps = _rounds(target, sequence, own, DraftSize(4), plain, rounds)
        jobs.append(Job(sequence, steps))
    play(jobs)
    for job in jobs:
        assert job.error is None, job.error
        for model, cache in zip((target, view), job.sequence.caches, strict=True):
            model.release(cache)
    assert view._backend.pool.free_positions == view._backend.pool.positions
    return [[each.result for each in job.reports] for job in jobs], view


@pytest.mark.parametrize(
    ("kind", "recipe", "plain"),
    [("chunks", CHAIN, ()), ("window", CHAIN, (3, 4, 5, 20)), ("chunks", CASCADE, (3, 20))],
)
def test_where_all_keys_are_seen_all_tokens_are_kept(
    target: Decoder, kind: Any, recipe: Recipe, plain: Sequence[int]
) -> None:
    keys = SparseKeys(kind, budget=400)
    found, _ = texts(target, keys, recipe, plain=plain, rounds=30)
    for text in found:
        for done in text:
            assert done.decision.num_accepted == len(done.decision.draft)
    assert sum(len(done.decision.draft) for done in found[0]) > 80


@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        (SparseKeys("window", budget=WINDOW, sink=0), CHAIN),
        (SparseKeys("window", budget=20, sink=3), CHAIN),
        (SparseKeys("chunks", budget=40, sink=4, recent=WINDOW, chunk=4), CASCADE),
    ],
)
def test_new_tokens_go_on_at_their_own_positions(
    windowed: Decoder, keys: SparseKeys, recipe: Recipe
) -> None:
    """What this target does not see is not missed, however often keys are chosen anew. Keys before
    its window would be seen: by their places, they are further away than they take slots."""
    found, view = texts(windowed, keys, recipe, rounds=60)
    if keys.sink == 0:
        for text in found:
            for done in text:
                assert done.decision.num_accepted == len(done.decision.draft)
    assert sum(len(done.decision.emitted) for done in found[0]) > 2 * STRIDE
    assert view.forward_passes


def test_texts_over_few_keys_are_those_of_plain_decoding(target: Decoder) -> None:
    keys = SparseKeys("chunks", budget=40, sink=4, recent=8, chunk=4)
    (_, greedy), _ = texts(target, keys)
    (_, plain), _ = texts(target, keys, plain=range(200), rounds=80)
    ids = [one for done in greedy for one in done.decision.emitted]
    assert ids[:80] == [one for done in plain for one in done.decision.emitted][: len(ids)]
    kept = [done.decision.num_accepted for done in greedy]
    assert min(kept) < 4
    assert max(kept) > 1


@pytest.fixture
def chosen(target: Decoder) -> Iterator[tuple[Any, Any, SparseCache, SparseKeys]]:
    """The pools and caches of a text of 203 tokens, after the first row over few keys."""
    keys = SparseKeys("chunks", budget=64, sink=6, recent=10, chunk=8)
    view = SparseView(target, keys, 1)
    cache, own = target.reserve(260), view.reserve(260)
    assert cache is not None
    assert own is not None
    tokens = [(5 * n * n + n) % VOCAB_SIZE for n in range(204)]
    with torch.inference_mode():
        target.forward([Feed(cache, tokens[:-1], 0)])
        own.show(cache)
        view.forward([Feed(own, tokens[-1:], 1)])
    yield target.backend.pool, cache, own, keys
    target.release(cache)
    view.release(own)


def test_keys_are_the_first_the_latest_and_the_chunks_pointed_at(
    chosen: tuple[Any, Any, SparseCache, SparseKeys],
) -> None:
    pool, cache, own, keys = chosen
    mine: Any = own.pool
    length, chunks = cache.length, (cache.length - keys.sink - keys.recent) // keys.chunk
    latest = keys.sink + chunks * keys.chunk
    assert (own.length, own.skipped) == (6 + 48 + 204 - latest, latest - 54)
    for layer in range(2):
        for head in range(2):
            there = pool.keys[layer][head, cache.start : cache.start + length + 1]
            held = mine.keys[layer][head, own.start : own.start + own.length]
            assert held[:6].equal(there[:6])
            assert held[54:].equal(there[latest:])
            places = [
                keys.sink + keys.chunk * n
                for n in range(chunks)
                if any(
                    held[at : at + 8].equal(there[keys.sink + 8 * n : keys.sink + 8 * n + 8])
                    for at in range(6, 54, 8)
                )
            ]
            assert len(places) == keys.chunks
    heads = {tuple(mine.keys[0][head, own.start + 6].tolist()) for head in range(2)}
    assert len(heads) == 2


def test_chunks_are_those_of_the_largest_scores() -> None:
    """By the sum over the query heads of a key head."""
    torch.manual_seed(1)
    keys = SparseKeys("chunks", budget=8, sink=2, recent=2, chunk=2)

    class Text:
        length, start = 22, 0

    class Held:
        of, start = Text(), 0
        pool = type("Pool", (), {"keys": [torch.zeros(2, 9, 4)], "values": [torch.zeros(2, 9, 4)]})

    own: Any = Held()
    own.keys = keys
    choice = KeyChoice(own, 1)
    source, query = torch.randn(2, 23, 4), torch.randn(4, 4)
    choice.see(0, query, source, source + 1)
    for head in range(2):
        scores = [
            float((query[2 * head : 2 * head + 2] @ source[head, at : at + 2].mean(0)).sum())
            for at in range(2, 20, 2)
        ]
        best = sorted(sorted(range(9), key=lambda n: -scores[n])[:2])
        places = [0, 1, *(2 + 2 * n + i for n in best for i in range(2)), 20, 21, 22]
        assert own.pool.keys[0][head].equal(source[head, places])
        assert own.pool.values[0][head].equal(source[head, places] + 1)


def test_keys_are_chosen_anew_where_much_less_is_kept(target: Decoder) -> None:
    view = SparseView(target, SparseKeys("window", budget=32), 1)
    own, cache = view.reserve(200), target.reserve(200)
    assert own is not None
    assert cache is not None
    own.show(cache)
    tokens = list(range(20))
    with torch.inference_mode():
        target.forward([Feed(cache, tokens, 0)])
        view.forward([Feed(own, [1], 1)])
        for kept in (4, 4, 4, 4, 0, 0):
            for _ in range(3):
                view.forward([Feed(own, [1], 1)])
            target.forward([Feed(cache, [1] * (kept + 1), 0)])
            assert not own.due
            own.keep_text(cache.length, cache.length + 1)
            if own.due:
                break
            view.forward([Feed(own, [1], 1)])
    assert own.due
    target.release(cache)
    view.release(own)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            SparseKeys(budget=80, sink=16, recent=64),
            "budget = 80 holds no chunk of 8 beside 16 first and 64",
        ),
        (SparseKeys("window", budget=4, sink=4), "budget = 4 leaves no latest key"),
        (SparseKeys(chunk=0), "budget and chunk must be at least 1"),
        (
            SparseKeys(budget=40),
            "budget = 40 holds no chunk of 8 beside 16 first and 30 latest keys",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_named(keys: SparseKeys, sentence: str) -> None:
    assert sentence in keys.fault
    kv: dict[str, Any] = {"kind": keys.kind, "budget": keys.budget, "sink": keys.sink}
    if keys.kind == "chunks":
        kv |= {"recent": keys.recent, "chunk": keys.chunk}
    with pytest.raises(ValueError, match=sentence):
        ModelRecipe(model="@target", kv=kv)


def test_a_model_that_does_not_show_its_keys_is_named(tmp_path: Any) -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    other = decoder_over(model, "other", cache_tokens=256, engine="openvino")
    with pytest.raises(StartupError, match="ENGINE=torch alone, and this model is computed by"):
        SparseView(other, SparseKeys(), 1)
