"""A CUDA device of torch's fake tensors, and the rounds that run on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from tandem.drafting.choice.built_in import built_in
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.drafter import DraftSequence
from tandem.engine import stepper as steppers
from tandem.engine.answers import Decision
from tandem.engine.asks import Take, Truncation
from tandem.engine.job import Job
from tandem.engine.numbers import home
from tandem.engine.stepper import Stepper
from tandem.inference.decoder import Decoder
from tandem.inference.kv.pool import KVPool
from tandem.inference.passes import torch_llama
from tandem.inference.passes.backend import Backend
from tandem.inference.passes.backends import Backends
from tandem.inference.passes.torch_modules import ModulePass
from tandem.kernels import attention as kernels
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Feedback, FeedbackWanted
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc import round as rounds
from target_svc import run as runs
from target_svc.drafts import OwnDrafts
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence
from target_svc.run import Credit
from tests.support.decoders import decoder_over

VOCAB_SIZE = 600  # beyond the first look of top-p
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_HEADS = {"head_dim": 8, "sliding_window": 4}
LLAMA, QWEN = LlamaConfig(**_SIZES), Qwen3Config(**_SIZES, head_dim=8)
MISTRAL = MistralConfig(**_SIZES, **_HEADS)
# Its layers have a window or none, in turn.
GEMMA = Gemma2Config(**{**_SIZES, **_HEADS, "num_hidden_layers": 2})
GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(seed=1)
SHAPED = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=2)


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

    def times(self, stamps: Sequence[int], ended_ns: int) -> list[int]:
        self.waits += 1
        return list(stamps)


@dataclass
class Kernel:
    """Counts calls of attention that take a whole batch."""

    calls: int = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Stamps:
    clock = Stamps()
    monkeypatch.setattr(steppers, "clock_of", lambda device: clock)
    return clock


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel, computing = Kernel(), kernels.attend

    def attend(*args: Any) -> Tensor:
        kernel.calls += 1
        return computing(*args)

    monkeypatch.setattr(kernels, "attend", attend)
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
    monkeypatch.setattr(home, "copy_to_host", host.take)

    def start(self: Decoder, model: Any, *rest: Any) -> None:
        """Without the probe, which compares numbers."""
        own = torch_llama.LlamaPass
        layers = self.about.of_layers
        compute = own(model, layers) if own.fits(model) else ModulePass(model, layers)
        pool = KVPool(512)
        backend = Backend(
            "torch",
            model.dtype,
            compute,
            pool,
            self.device,
            self.vocab_size,
            of_layers=layers,
            in_one_call=in_one_call,
        )
        self._backends = Backends(backend)

    monkeypatch.setattr(Decoder, "_start", start)
    # A fake parameter is of another class; without this all models would run as their modules.
    monkeypatch.setattr(torch_llama, "_plain", lambda part, kind: type(part) is kind)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield host


def decoder_on_device(
    config: PreTrainedConfig, modules: bool = False, states_of: str = "none"
) -> Decoder:
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config)
    if modules:
        model.config.hidden_act = "gelu"  # what no plain list of operators is written for
    return decoder_over(model, "fake", states_of=states_of)


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
        for job in pending:
            job.take_reports()
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
        return drafter.draft(sequence, 1, gamma, gamma)

    for drafted in run(stepper, sequences, begin):
        assert len(drafted.token_ids) == gamma


class _AtOpen(OwnDrafting):
    """Keeps the states of a verdict whose numbers are no real ones, and no token of it."""

    def note(self, decision: Decision, told: FeedbackWanted | None) -> None:
        self.untold = [] if decision.feedback is None else [decision.feedback]


def draft_inside(
    decoders: tuple[Decoder, Any],
    samplings: Sequence[Sampling],
    rule: str,
    rounds_: int,
    *,
    on_device: bool,
    recipe: str = "model",
) -> None:
    """Open, then compute rounds whose drafts the target makes itself; all are decided alike.

    Args:
        decoders: the target's and the drafter's.
        samplings: of each sequence.
        rule: that decides.
        rounds_: to compute.
        on_device: see `OwnDrafts`.
        recipe: that drafts.
    """
    target, small = decoders
    method = built_in(recipe, RecipeSettings()).make([small], Truncation(0.99, 16))
    wanted = None
    if method.traits.feedback.told:
        wanted = replace(method.traits.feedback, prompt_tokens=1, columns=(0,), on_device=True)
    own = OwnDrafts(method, target_pb2.TargetDrafts(), VOCAB_SIZE, on_device, wanted)
    nodes = 6 if method.traits.largest_tree else 0
    sequences = [
        TargetSequence(
            [1] * (2 + i),
            TargetRequest(sampling, VERIFIERS[rule], nodes=nodes, end=60),
            own=_AtOpen([], wanted),
        )
        for i, sampling in enumerate(samplings)
    ]
    for sequence in sequences:
        sequence.caches += [decoder.reserve(80) for decoder in decoders]
    stepper = Stepper(target.device)
    run(stepper, sequences, lambda one: rounds.open_(target, one, 0))
    lengths = [sequence.length for sequence in sequences]
    for sequence in sequences:
        assert sequence.own is not None
        at = range(sequence.length - 2, sequence.length - 1)
        untold = [Feedback(0, at, one.states[:1]) for one in sequence.own.untold]
        sequence.own = OwnDrafting([1] * sequence.length, wanted, untold)

    def begin(sequence: TargetSequence) -> Any:
        credit = Credit(0)
        credit.grant(rounds_, DraftSize(3, nodes))
        return runs.run(target, sequence, credit, own)

    run(stepper, sequences, begin)
    assert [one.length for one in sequences] == [length + 2 * rounds_ for length in lengths]


def a_draft(gamma: int) -> Draft:
    ids = np.tile(np.arange(4, dtype=np.uint32), gamma)
    weights = np.tile(np.array([65535, 9, 9, 9], np.uint16), gamma)
    return Draft([1] * gamma, [4] * gamma, ids, weights)


def verify(decoder: Decoder, samplings: Sequence[Sampling], rule: str, gammas: Any) -> None:
    """Open and verify drafts of given lengths; with hidden states if the decoder gives any."""
    stepper = Stepper(decoder.device)
    layers = tuple(range(len(decoder.about.of_layers)))
    wanted = FeedbackWanted(layers, prompt_tokens=2, columns=layers) if layers else None
    sequences = [
        TargetSequence([1] * (2 + i), TargetRequest(sampling, VERIFIERS[rule], feedback=wanted))
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
        lambda one: rounds.verify(decoder, one, 1, a_draft(lengths[id(one)]), wanted),
    )
    for decision in decided:
        assert decision.num_accepted == 1
        if layers:
            assert decision.feedback.states.shape == (2, len(layers), decoder.about.hidden_size)
