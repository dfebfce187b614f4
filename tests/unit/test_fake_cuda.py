"""The CUDA path without a GPU: torch's fake tensors have shapes and devices, and no numbers.

A round of a batch runs as if on a device. Fake tensors refuse to mix devices and to be asked for
a number, so what passes makes nothing in the wrong place and never waits for the device but
where it is allowed to: once, when a draft or a verdict goes to the host.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from drafter_svc.built_in import built_ins
from drafter_svc.methods import METHODS
from drafter_svc.settings import DrafterSettings
from tandem.drafting.drafter import DraftSequence
from tandem.drafting.model import ModelDrafter
from tandem.engine import decisions, draws
from tandem.engine import stepper as steppers
from tandem.engine.asks import Take, Truncation
from tandem.engine.job import Job
from tandem.engine.stepper import Stepper
from tandem.inference import attention, flex, graph, tiles
from tandem.inference.backend import Backend
from tandem.inference.backends import Backends
from tandem.inference.cache import KVPool
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Drawn, Draws, Feed
from tandem.inference.llama import LlamaPass
from tandem.inference.modules import ModulePass
from tandem.inference.tiles import BLOCK, Tiles
from tandem.speculation import distribution
from tandem.speculation.draft import Draft
from tandem.speculation.sampling import Sampling
from tandem.telemetry.stages import StageTimes
from tandem.verification import VERIFIERS
from target_svc import round as rounds
from target_svc.round import TargetSequence
from tests.flex import Kernel
from tests.recording import Recorder

VOCAB_SIZE = 600  # beyond the first look of top-p
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA, QWEN = LlamaConfig(**_SIZES), Qwen3Config(**_SIZES, head_dim=8)
_HEADS = {"head_dim": 8, "sliding_window": 4}
GEMMA, MISTRAL = Gemma2Config(**_SIZES, **_HEADS), MistralConfig(**_SIZES, **_HEADS)
GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(seed=1)
SHAPED = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=2)
MIXTURES = {"plain": [PLAIN] * 3, "mixed": [GREEDY, PLAIN, SHAPED], "greedy": [GREEDY] * 3}


@dataclass
class Host:
    """Where results arrive; counts how often, and that they came from the device."""

    arrivals: int = 0
    devices: set[str] = field(default_factory=set)

    def take(self, tensors: Sequence[Tensor]) -> list[np.ndarray]:
        self.arrivals += 1
        self.devices |= {tensor.device.type for tensor in tensors}
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        return [np.ones(t.shape, kind) for t, kind in zip(tensors, kinds, strict=True)]


@dataclass
class Stamps:
    """In place of a GPU's events; counts how often somebody waits for them."""

    waits: int = 0
    stamps: int = 0

    def stamp(self) -> int:
        self.stamps += 1
        return self.stamps * 1000

    def times(self, stamps: Sequence[int]) -> list[int]:
        self.waits += 1
        return list(stamps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Stamps:
    clock = Stamps()
    monkeypatch.setattr(steppers, "clock_of", lambda device: clock)
    return clock


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(flex, "_compiled", lambda: kernel)
    return kernel


@pytest.fixture
def in_one_call(request: pytest.FixtureRequest) -> bool:
    """Whether attention takes all texts of a batch at once; so it is, but where that fails."""
    return bool(getattr(request, "param", True))


@pytest.fixture
def host(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, clock: Stamps, in_one_call: bool
) -> Iterator[Host]:
    """A device that is not there, and what comes from it."""
    host = Host()
    for module in (draws, decisions):
        monkeypatch.setattr(module, "to_host", host.take)

    def start(self: Decoder, model: Any, *rest: Any) -> None:
        """Without the probe, which compares numbers."""
        compute = LlamaPass(model) if LlamaPass.fits(model) else ModulePass(model)
        pool = KVPool(512, BLOCK if in_one_call else 1)
        backend = Backend("torch", model.dtype, compute, pool, self.device, in_one_call=in_one_call)
        self._backends = Backends(backend)

    monkeypatch.setattr(Decoder, "_start", start)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield host


def decoder_on_device(config: PreTrainedConfig, modules: bool = False) -> Decoder:
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config)
    if modules:
        model.config.hidden_act = "gelu"  # what no plain list of operators is written for
    return Decoder(model, "fake")


class Waiter:
    """Stands for the future of a job that nobody cancels."""

    def cancelled(self) -> bool:
        return False


def run(stepper: Stepper, sequences: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
    """What the steps of all sequences return, run together to their ends."""
    jobs: list[Job[Any]] = []
    for sequence in sequences:
        job: Job[Any] = Job(sequence, make(sequence))
        job.done = Waiter()  # type: ignore[assignment]
        job.resume()
        jobs.append(job)
    while pending := [job for job in jobs if not job.over]:
        for job in pending:
            if isinstance(job.ask, Take):
                job.chunk = job.ask.left
        # Fake tensors know no inference mode.
        inspect.unwrap(Stepper.step)(stepper, pending)
    for job in jobs:
        if job.error is not None:
            raise job.error
    return [job.result for job in jobs]


def draft(decoder: Decoder, samplings: Sequence[Sampling], support: int, gamma: int = 3) -> None:
    """Open and draft, for sequences of different lengths."""
    stepper, drafter = Stepper(decoder.device), ModelDrafter(decoder, Truncation(0.99, support))
    sequences = [
        DraftSequence([1] * (2 + i), sampling, VOCAB_SIZE - i)
        for i, sampling in enumerate(samplings)
    ]
    for sequence in sequences:
        cache = decoder.reserve(40)
        assert cache is not None
        sequence.caches.append(cache)
    run(stepper, sequences, drafter.open)

    def begin(sequence: DraftSequence) -> Any:
        sequence.token_ids.append(5)
        return drafter.draft(sequence, 1, gamma)

    for drafted in run(stepper, sequences, begin):
        assert len(drafted.token_ids) == gamma


def a_draft(gamma: int) -> Draft:
    ids = np.tile(np.arange(4, dtype=np.uint32), gamma)
    weights = np.tile(np.array([65535, 9, 9, 9], np.uint16), gamma)
    return Draft([1] * gamma, [4] * gamma, ids, weights)


def verify(decoder: Decoder, samplings: Sequence[Sampling], rule: str, gammas: Any) -> None:
    """Open and verify drafts of given lengths."""
    stepper = Stepper(decoder.device)
    sequences = [
        TargetSequence([1] * (2 + i), sampling, VERIFIERS[rule])
        for i, sampling in enumerate(samplings)
    ]
    for sequence in sequences:
        cache = decoder.reserve(40)
        assert cache is not None
        sequence.caches.append(cache)
    run(stepper, sequences, lambda sequence: rounds.open_(decoder, sequence, 0))
    lengths = dict(zip(map(id, sequences), gammas, strict=True))
    decided = run(
        stepper,
        sequences,
        lambda one: rounds.verify(decoder, one, 1, a_draft(lengths[id(one)])),
    )
    assert all(decision.num_accepted == 1 for decision in decided)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("support", [0, 16])
def test_a_draft_waits_for_the_device_once(
    host: Host, clock: Stamps, mixture: str, support: int
) -> None:
    draft(decoder_on_device(LLAMA), MIXTURES[mixture], support)
    assert (host.arrivals, host.devices) == (1, {"cuda"})
    assert clock.waits == 2  # behind the opening's last pass, and behind the draft


# Chains have to know which of them agree, level by level.
@pytest.mark.parametrize(("name", "arrivals"), [("tree", 1), ("chains", 3), ("forest", 1)])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_draft_with_branches_stays_on_the_device(
    host: Host, mixture: str, name: str, arrivals: int
) -> None:
    recipe = built_ins(DrafterSettings(chains=2))[name]
    decoders = [decoder_on_device(copy.deepcopy(LLAMA)) for _ in recipe.checkpoints]
    drafter = METHODS[name](recipe, decoders, Truncation(0.99, 16))
    sequences = [DraftSequence([1] * 3, one, VOCAB_SIZE) for one in MIXTURES[mixture]]
    for sequence in sequences:
        sequence.caches = [decoder.reserve(40) for decoder in decoders]
    stepper = Stepper(decoders[0].device)
    run(stepper, sequences, drafter.open)

    def begin(sequence: DraftSequence) -> Any:
        return drafter.go_on(sequence, 1, [5], 3, 6)

    for drafted in run(stepper, sequences, begin):
        assert len(drafted) > 0
    waits = 1 if mixture == "greedy" else arrivals
    assert (host.arrivals, host.devices) == (waits, {"cuda"})


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("rule", VERIFIERS)
def test_a_verification_waits_for_the_device_once(
    host: Host, clock: Stamps, mixture: str, rule: str
) -> None:
    decoder = decoder_on_device(LLAMA)
    gammas = [3, 3, 3] if VERIFIERS[rule].fixed_gamma else [3, 2, 0]
    verify(decoder, MIXTURES[mixture], rule, gammas)
    assert (host.arrivals, host.devices) == (2, {"cuda"})  # the opening's token is one
    assert clock.waits == 2  # with these


@pytest.mark.parametrize("in_one_call", [False, True], indirect=True)
@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("config", [LLAMA, QWEN, GEMMA, MISTRAL], ids=lambda one: one.model_type)
def test_every_pass_stays_on_the_device(
    host: Host, kernel: Kernel, in_one_call: bool, config: PreTrainedConfig, modules: bool
) -> None:
    decoder = decoder_on_device(config, modules)
    draft(decoder, MIXTURES["mixed"], 16)
    verify(decoder, MIXTURES["mixed"], "block", [3, 1, 2])
    assert host.devices == {"cuda"}
    # Openings and drafts, of three texts each, in both layers; a call for each text otherwise.
    assert kernel.calls == (2 * (1 + 3 + 1 + 1) if in_one_call else 0)


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("config", [LLAMA, GEMMA, MISTRAL], ids=lambda one: one.model_type)
def test_trees_stay_on_the_device(
    host: Host, kernel: Kernel, config: PreTrainedConfig, at_once: bool, modules: bool
) -> None:
    """Two texts with trees, grown by drawn tokens, beside a chain; then paths are kept."""
    decoder = decoder_on_device(config, modules)
    decoder._backends.current.branches_in_one_call = at_once
    caches = [cache for cache in (decoder.reserve(40) for _ in range(3)) if cache]
    decoder.forward([Feed(cache, [1, 2, 3], 0) for cache in caches])
    kernel.calls = 0
    drawn = Draws(torch.ones(4, dtype=torch.int64, device="cuda"), None)  # type: ignore[arg-type]
    levels = ((0, 0), (1, 2)), ((0, 0, 1), (2, 0, 3))
    for level in range(2):
        feeds = [
            Feed(cache, [Drawn(drawn, i) for i in range(len(tree[level]))], 1, tree[level])
            for cache, tree in zip(caches, levels, strict=False)
        ]
        logits = decoder.forward([*feeds, Feed(caches[2], [5], 1)])
        assert (tuple(logits.shape), logits.device.type) == ((3, VOCAB_SIZE), "cuda")
    for cache, path in zip(caches, ((2, 4), (1, 3, 6)), strict=False):
        cache.keep(path)
    assert kernel.calls == (4 if at_once else 0)
    assert decoder.forward([Feed(cache, [5], 1) for cache in caches]).device.type == "cuda"


def test_times_are_the_devices_own(host: Host, clock: Stamps) -> None:
    """Of each step: a stamp before its passes, one behind them, one at its end."""
    decoder, times = decoder_on_device(LLAMA), []

    def noting(self: Job[Any], *spent: int) -> None:
        times.append(spent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageTimes, "computed", noting)
        draft(decoder, [PLAIN] * 2, 16, gamma=3)
    assert times == [(n, n + 1000, n + 2000) for n in (1000, 4000, 7000, 10000) for _ in range(2)]


@pytest.mark.parametrize("rule", VERIFIERS)
def test_captured_passes_stay_on_the_device(
    host: Host, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """And so does what fills them: a graph would read memory of the host, or wait for it."""
    recorder = Recorder()
    monkeypatch.setattr(graph, "capture", recorder)
    monkeypatch.setattr(graph, "_check", lambda *_: None)  # which compares numbers
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    decoder = decoder_on_device(LLAMA)
    graph.capture_passes(decoder._backends.current, 16, 40)
    assert len(recorder.recordings) == len(graph.rooms(16, 40))
    gammas = [3, 3, 3] if VERIFIERS[rule].fixed_gamma else [3, 2, 0]
    verify(decoder, MIXTURES["mixed"], rule, gammas)
    draft(decoder, MIXTURES["mixed"], 16)
    assert (host.arrivals, host.devices) == (3, {"cuda"})
    # Openings of few tokens too, and each step of the draft.
    assert recorder.replays == 1 + 1 + 1 + 3


# Mutants: what a reader would overlook, and a GPU would pay for each round.


def test_a_hidden_wait_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    process = distribution.process

    def asking(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
        probs = process(logits, samplings)
        return probs if probs.sum().item() else logits

    monkeypatch.setattr(decisions, "process", asking)
    with pytest.raises(DataDependentOutputException):
        verify(decoder_on_device(LLAMA), [PLAIN], "block", [3])


def test_a_hidden_list_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = draws.draw

    def asking(*args: Any) -> Any:
        drawn = drawing(*args)
        drawn[0][0].draws.tokens.tolist()
        return drawn

    monkeypatch.setattr("tandem.engine.stepper.draw", asking)
    with pytest.raises(DataDependentOutputException):
        draft(decoder_on_device(LLAMA), [PLAIN], 16)


def test_a_tensor_made_on_the_host_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention._attend_one

    def misplacing(batch: Any, query: Tensor, *rest: Any) -> Tensor:
        return attend(batch, query, *rest) * torch.ones(2, query.shape[-1])[0]

    monkeypatch.setattr(attention, "_attend_one", misplacing)
    with pytest.raises(RuntimeError, match="device"):
        draft(decoder_on_device(LLAMA), [PLAIN], 16)


def test_a_count_of_blocks_that_is_asked_for_is_caught(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = Tiles.mask

    def asking(self: Tiles, *args: Any) -> Any:
        mask = making(self, *args)
        mask.kv_num_blocks.max().item()
        return mask

    monkeypatch.setattr(Tiles, "mask", asking)
    with pytest.raises(DataDependentOutputException):
        draft(decoder_on_device(LLAMA), [PLAIN] * 2, 16)


def test_a_mask_made_on_the_host_is_caught(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = tiles.Sent

    def staying(device: torch.device, kind: Any, *arrays: Any) -> Any:
        return sending(torch.device("cpu") if kind is np.int32 else device, kind, *arrays)

    monkeypatch.setattr(tiles, "Sent", staying)
    with pytest.raises(RuntimeError, match="device"):
        draft(decoder_on_device(LLAMA), [PLAIN] * 2, 16)
