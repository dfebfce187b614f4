"""Rounds on a real GPU: how often the host waits for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.drafting.choice.built_in import built_in
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.drafter import DraftSequence, go_on
from tandem.engine.asks import Truncation
from tandem.engine.numbers import home
from tandem.engine.stepper import Stepper
from tandem.inference.decoder import Decoder
from tandem.speculation.tree import DraftShape, DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc import round as rounds
from target_svc import run as runs
from target_svc.drafts import OwnDrafts
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence
from target_svc.run import Credit
from tests.support.decoders import decoder_over
from tests.unit.inference.passes.fake_device import (
    GREEDY,
    PLAIN,
    SHAPED,
    VOCAB_SIZE,
    run,
)
from tests.unit.inference.passes.test_chains import CUT, SAMPLINGS, drafts, same

pytestmark = pytest.mark.campaign(
    "passes, rounds, kernels and the law on a real GPU",
    "unit/inference/passes and batch, unit/kernels: the same code with fake devices, kernels "
    "interpreted",
)

MIXTURE = [GREEDY, PLAIN, SHAPED]
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
Waits = Callable[[], tuple[int, int]]


def on_the_gpu(seed: int, **options: Any) -> Decoder:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG).to("cuda")
    return decoder_over(
        model, "tiny", cache_tokens=2048, trees=True, graph_rows=16, longest=64, **options
    )


@contextmanager
def counted() -> Iterator[Waits]:
    """How often results were fetched, and how often torch waited for the device at all. The
    engine's clock also waits, for an event after them."""
    fetched: list[int] = []
    fetching = home.copy_to_host

    def fetch(tensors: Any) -> Any:
        fetched.append(1)
        return fetching(tensors)

    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "copy_to_host", fetch)
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: (len(fetched), sum("synchroniz" in str(one.message) for one in told))
        finally:
            torch.cuda.set_sync_debug_mode("default")
            Console().print(*(f"{one.filename}:{one.lineno} {one.message}" for one in told))


def texts(decoder: Decoder, make: Callable[[list[int], Any], Any]) -> list[Any]:
    sequences = [make([1 + i] * (2 + i), sampling) for i, sampling in enumerate(MIXTURE)]
    for sequence in sequences:
        cache = decoder.reserve(60)
        assert cache is not None
        sequence.caches.append(cache)
    return sequences


def one_round(
    drafter: Any, rule: Any, small: Decoder, target: Decoder, stepper: Stepper
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The waits of a draft, and those of its verification, for three texts together."""
    drafting = texts(small, lambda ids, one: DraftSequence(ids, one, VOCAB_SIZE))
    verifying = texts(target, lambda ids, one: TargetSequence(ids, TargetRequest(one, rule)))
    run(stepper, drafting, drafter.open)
    opened = run(stepper, verifying, lambda one: rounds.open_(target, one, 0))
    first = {id(one): each.next_token for one, each in zip(drafting, opened, strict=True)}
    with counted() as count:
        drafts = run(
            stepper, drafting, lambda one: go_on(drafter, one, 1, [first[id(one)]], DraftSize(3, 6))
        )
        drafted = count()
    own = dict(zip(map(id, verifying), drafts, strict=True))
    with counted() as count:
        run(stepper, verifying, lambda one: rounds.verify(target, one, 1, own[id(one)]))
        verified = count()
    for decoder, sequences in ((small, drafting), (target, verifying)):
        for sequence in sequences:
            decoder.release(sequence.caches[0])
    return drafted, verified


@pytest.mark.parametrize("rule", VERIFIERS)
@torch.inference_mode()
def test_a_draft_waits_once_and_its_verification_once(rule: str) -> None:
    small, target, stepper = on_the_gpu(2), on_the_gpu(1), Stepper(torch.device("cuda"))
    several = VERIFIERS[rule].takes is DraftShape.IID_CHAINS
    recipe = built_in("chains" if several else "model", RecipeSettings(chains=2))
    drafter = recipe.make([small], Truncation(0.99, 16))
    one_round(drafter, VERIFIERS[rule], small, target, stepper)  # kernels are compiled meanwhile
    drafted, verified = one_round(drafter, VERIFIERS[rule], small, target, stepper)
    if not several:  # chains have to know which of them agree
        assert drafted == (1, 1)
    assert verified == (1, 1)


def test_a_chain_of_one_replay_is_the_one_that_is_drawn_token_by_token() -> None:
    small, bare = on_the_gpu(2, chains=CUT), on_the_gpu(2)
    assert small.chains
    together = [[4] * 5, [8] * 5, [3] * 5, [2, 4, 8, 1, 5]]
    for count, gammas in ((5, together), (1, [[4], [6], [1], [9]])):
        expected = drafts(bare, SAMPLINGS[:count], gammas)
        assert same(drafts(small, SAMPLINGS[:count], gammas), expected)


@pytest.mark.parametrize("cut", [None, CUT])
@pytest.mark.parametrize("rule", ["block", "token"])
@torch.inference_mode()
def test_a_round_with_a_draft_inside_waits_once(rule: str, cut: tuple[float, int] | None) -> None:
    target, small = on_the_gpu(1), on_the_gpu(2, chains=cut)
    stepper = Stepper(torch.device("cuda"))
    method = built_in("model", RecipeSettings()).make([small], Truncation(0.99, 16))
    own = OwnDrafts(method, target_pb2.TargetDrafts(), VOCAB_SIZE, on_device=True)

    def made(ids: list[int], sampling: Any) -> TargetSequence:
        request = TargetRequest(sampling, VERIFIERS[rule], end=50)
        return TargetSequence(ids, request, own=OwnDrafting([]))

    def begin(sequence: TargetSequence) -> Any:
        credit = Credit(0)
        credit.grant(3, DraftSize(3, 0))
        return runs.run(target, sequence, credit, own)

    for _ in range(2):
        sequences = texts(target, made)
        run(stepper, sequences, lambda one: rounds.open_(target, one, 0))
        for sequence in sequences:
            sequence.caches.append(small.reserve(60))
            assert sequence.own is not None
            sequence.own.news = [1] * sequence.length
        with counted() as count:
            run(stepper, sequences, begin)
            found = count()
        for sequence in sequences:
            for decoder, cache in zip((target, small), sequence.caches, strict=True):
                decoder.release(cache)
    assert found == (3, 3)
