"""The CUDA path without a GPU: torch's fake tensors have shapes and devices, but no values.

A round of a batch runs as if on a device. Fake tensors raise if devices are mixed or a value is
read. So code that passes creates no tensor on the wrong device, and waits for the device only
where that is allowed: once, when a draft or a verdict goes to the host.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.drafter import DraftSequence, go_on
from tandem.engine.asks import Truncation
from tandem.engine.job import Job
from tandem.engine.numbers import decisions
from tandem.engine.stepper import Stepper
from tandem.inference.feed import DrawnToken, Draws, Feed
from tandem.inference.heads import head
from tandem.inference.kv import size
from tandem.inference.passes import cuda_graphs as graph
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes
from tandem.verification import VERIFIERS
from tests.support.devices.recording import Recorder
from tests.support.models.heads import random_head
from tests.unit.inference.passes.fake_device import (
    GEMMA,
    GREEDY,
    LLAMA,
    MISTRAL,
    PLAIN,
    QWEN,
    SHAPED,
    VOCAB_SIZE,
    Host,
    Kernel,
    Stamps,
    clock,
    decoder_on_device,
    draft,
    draft_inside,
    host,
    in_one_call,
    kernel,
    run,
    verify,
)

__all__ = ["clock", "host", "in_one_call", "kernel"]  # fixtures of the fake device

MIXTURES = {"plain": [PLAIN] * 3, "mixed": [GREEDY, PLAIN, SHAPED], "greedy": [GREEDY] * 3}


OTHERS = pytest.mark.campaign(
    "a round waits for the device once, with every mixture of samplings, heads, models and rules",
    "one of each kind (this file); a real GPU runs the same code (system/gpu)",
)


def campaign(*values: Any) -> Any:
    return pytest.param(*values, marks=OTHERS)


@pytest.mark.parametrize(
    ("support", "mixture"),
    [
        (0, "mixed"),
        (16, "plain"),
        (16, "greedy"),
        campaign(0, "plain"),
        campaign(0, "greedy"),
        campaign(16, "mixed"),
    ],
)
def test_a_draft_waits_for_the_device_once(
    host: Host, clock: Stamps, mixture: str, support: int
) -> None:
    draft(decoder_on_device(LLAMA), MIXTURES[mixture], support)
    assert (host.arrivals, host.devices) == (1, {"cuda"})
    assert clock.waits == 2  # after the opening's last pass, and after the draft


# Chains have to know which of them agree, level by level.
@pytest.mark.parametrize(
    ("name", "arrivals", "mixture"),
    [
        ("tree", 1, "mixed"),
        ("chains", 3, "mixed"),
        ("forest", 1, "mixed"),
        ("chains", 3, "greedy"),
        campaign("chains", 3, "plain"),
    ],
)
def test_a_draft_with_branches_stays_on_the_device(
    host: Host, mixture: str, name: str, arrivals: int
) -> None:
    recipe = built_in(name, DrafterSettings(chains=2))
    decoders = [decoder_on_device(copy.deepcopy(LLAMA)) for _ in recipe.checkpoints]
    drafter = recipe.make(decoders, Truncation(0.99, 16))
    sequences = [DraftSequence([1] * 3, one, VOCAB_SIZE) for one in MIXTURES[mixture]]
    for sequence in sequences:
        sequence.caches = [decoder.reserve(40) for decoder in decoders]
    stepper = Stepper(decoders[0].device)
    run(stepper, sequences, drafter.open)

    def begin(sequence: DraftSequence) -> Any:
        return go_on(drafter, sequence, 1, [5], DraftSize(3, 6))

    for drafted in run(stepper, sequences, begin):
        assert len(drafted) > 0
    waits = 1 if mixture == "greedy" else arrivals
    assert (host.arrivals, host.devices) == (waits, {"cuda"})


# A rule takes the rows of any mixture: only what makes them depends on it.
@pytest.mark.parametrize(
    ("rule", "mixture"),
    [
        *((rule, "mixed") for rule in VERIFIERS if rule != "token"),
        ("block", "greedy"),
        campaign("token", "mixed"),
        campaign("block", "plain"),
    ],
)
def test_a_verification_waits_for_the_device_once(
    host: Host, clock: Stamps, mixture: str, rule: str
) -> None:
    decoder = decoder_on_device(LLAMA)
    gammas = [3, 3, 3] if VERIFIERS[rule].needs_every_draft else [3, 2, 0]
    verify(decoder, MIXTURES[mixture], rule, gammas)
    assert (host.arrivals, host.devices) == (2, {"cuda"})  # the opening's token is one
    assert clock.waits == 2  # with these


@pytest.mark.parametrize("rule", ["block", "spectr"])
def test_hidden_states_come_with_the_verdict(host: Host, clock: Stamps, rule: str) -> None:
    decoder = decoder_on_device(LLAMA, states_of="0,last")
    verify(decoder, MIXTURES["mixed"], rule, [3, 2, 1])
    assert (host.arrivals, host.devices) == (2, {"cuda"})  # the opening's token is one
    assert clock.waits == 2


# Hidden states stay where they are: the tree and the verdict are waited for, and nothing else.
@pytest.mark.parametrize("recipe", ["medusa", campaign("hydra"), "eagle"])
def test_a_head_inside_reads_states_on_the_device(
    host: Host, clock: Stamps, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fake tensor has no bytes.
    monkeypatch.setattr(head, "tensors_fingerprint", lambda *given: "")
    # Nor is one of a single number copied to the device to keep its value.
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0)
    monkeypatch.setattr(size, "free_memory", lambda device: 1 << 31)
    monkeypatch.setattr(torch, "equal", lambda one, other: False)
    # What comes from a fake device is all ones, also the ids of a row.
    monkeypatch.setattr(decisions, "faults", lambda drafts, vocab_size: {})
    target = decoder_on_device(LLAMA, states_of="last")
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LLAMA)
    small = random_head(recipe, model, device="cuda")
    draft_inside((target, small), MIXTURES["mixed"], "token", 2, on_device=True, recipe=recipe)
    assert (host.arrivals, host.devices) == (1 + 2 * 2, {"cuda"})  # the opening's token is one
    assert clock.waits == 1 + 2


# A draft that comes to the host before it is scored is waited for too.
@pytest.mark.parametrize(
    ("rule", "mixture", "on_device", "waits"),
    [
        ("block", "mixed", True, 1),
        ("block", "greedy", False, 2),
        campaign("greedy_block", "mixed", True, 1),
        campaign("block", "greedy", True, 1),
    ],
)
def test_a_round_with_a_draft_inside_waits_for_the_device_once(
    host: Host, clock: Stamps, rule: str, mixture: str, on_device: bool, waits: int
) -> None:
    decoders = decoder_on_device(LLAMA), decoder_on_device(copy.deepcopy(LLAMA))
    draft_inside(decoders, MIXTURES[mixture], rule, 2, on_device=on_device)
    assert (host.arrivals, host.devices) == (1 + 2 * waits, {"cuda"})  # the opening's token is one
    assert clock.waits == 1 + 2  # after each verdict, with it


# Plain operators without a window and with one; the modules of Gemma 2, which has layers of both
# kinds. A call for each text is the same code for all.
@pytest.mark.parametrize(
    ("config", "modules", "in_one_call"),
    [
        (LLAMA, False, True),
        (MISTRAL, False, True),
        (GEMMA, True, True),
        (LLAMA, False, False),
        campaign(QWEN, False, True),
        campaign(LLAMA, True, True),
        campaign(GEMMA, True, False),
    ],
    indirect=["in_one_call"],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_every_pass_stays_on_the_device(
    host: Host, kernel: Kernel, in_one_call: bool, config: PreTrainedConfig, modules: bool
) -> None:
    decoder = decoder_on_device(config, modules)
    # What decides of tokens is not the pass's: the tests above have its mixtures.
    draft(decoder, MIXTURES["greedy"], 16, gamma=2)
    verify(decoder, MIXTURES["greedy"], "block", [3, 1, 2])
    assert host.devices == {"cuda"}
    # Openings and drafts, of three texts each, in each layer; a call for each text otherwise.
    layers = config.num_hidden_layers
    assert kernel.calls == (layers * (1 + 2 + 1 + 1) if in_one_call else 0)


@pytest.mark.parametrize(
    ("config", "at_once", "modules"),
    [
        (LLAMA, True, False),
        (MISTRAL, True, False),
        (GEMMA, True, True),
        (LLAMA, False, False),
        campaign(LLAMA, True, True),
        campaign(GEMMA, False, True),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_trees_stay_on_the_device(
    host: Host, kernel: Kernel, config: PreTrainedConfig, at_once: bool, modules: bool
) -> None:
    """Two texts with trees, grown by drawn tokens, beside a chain; then paths are kept."""
    decoder = decoder_on_device(config, modules)
    decoder._backends.current.in_one_call = at_once
    caches = [cache for cache in (decoder.reserve(40) for _ in range(3)) if cache]
    decoder.forward([Feed(cache, [1, 2, 3], 0) for cache in caches])
    kernel.calls = 0
    drawn = Draws(torch.ones(4, dtype=torch.int64, device="cuda"), None)  # type: ignore[arg-type]
    levels = ((0, 0), (1, 2)), ((0, 0, 1), (2, 0, 3))
    for level in range(2):
        feeds = [
            Feed(cache, [DrawnToken(drawn, i) for i in range(len(tree[level]))], 1, tree[level])
            for cache, tree in zip(caches, levels, strict=False)
        ]
        logits = decoder.forward([*feeds, Feed(caches[2], [5], 1)]).logits
        assert (tuple(logits.shape), logits.device.type) == ((3, VOCAB_SIZE), "cuda")
    for cache, path in zip(caches, ((2, 4), (1, 3, 6)), strict=False):
        cache.keep(path)
    assert kernel.calls == (2 * config.num_hidden_layers if at_once else 0)
    output = decoder.forward([Feed(cache, [5], 1) for cache in caches])
    assert output.logits.device.type == "cuda"


def test_times_are_the_devices_own(host: Host, clock: Stamps) -> None:
    """Of each step: a stamp before its passes, one after them, one at its end."""
    decoder, times = decoder_on_device(LLAMA), []

    def noting(self: Job[Any], *spent: int) -> None:
        times.append(spent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageTimes, "computed", noting)
        draft(decoder, [PLAIN] * 2, 16, gamma=3)
    assert times == [(n, n + 1000, n + 2000) for n in (1000, 4000, 7000, 10000) for _ in range(2)]


@pytest.mark.parametrize(
    "rule",
    [pytest.param(name, marks=() if name == "block" else OTHERS) for name in VERIFIERS],
)
def test_captured_passes_stay_on_the_device(
    host: Host, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """And so does what fills them: a graph would read memory of the host, or wait for it."""
    recorder = Recorder()
    monkeypatch.setattr(graph, "capture", recorder)
    monkeypatch.setattr(graph, "_check", lambda *_: None)  # which compares numbers
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    decoder = decoder_on_device(LLAMA)
    decoder._backends.current.windows = (None,)
    graph.capture_passes(decoder._backends.current, 16, 40)
    assert len(recorder.recordings) == len(graph.rooms(16))
    gammas = [3, 3, 3] if VERIFIERS[rule].needs_every_draft else [3, 2, 0]
    verify(decoder, MIXTURES["mixed"], rule, gammas)
    draft(decoder, MIXTURES["mixed"], 16)
    assert (host.arrivals, host.devices) == (3, {"cuda"})
    # Openings of few tokens too, and each step of the draft.
    assert recorder.replays == 1 + 1 + 1 + 3


class Transfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that go from the host to the device, and the copies."""

    sent = copies = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        copies = {torch.ops.aten.copy_.default: 1, torch.ops.aten._to_copy.default: 0}
        if (place := copies.get(function)) is not None:
            source = args[place]
            if (source.device.type, found.device.type) == ("cpu", "cuda"):
                self.sent += source.nbytes
                self.copies += 1
        return found


def test_what_a_replay_is_told_comes_by_one_copy(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, places, what is seen, and which rows are wanted; from as many steps of draws."""
    monkeypatch.setattr(graph, "capture", Recorder())
    monkeypatch.setattr(graph, "_check", lambda *_: None)  # which compares numbers
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    decoder = decoder_on_device(copy.deepcopy(GEMMA), states_of="1,last")
    decoder._backends.current.windows = (4, None)
    graph.capture_passes(decoder._backends.current, 16, 100)
    caches = [cache for cache in (decoder.reserve(60), decoder.reserve(60)) if cache]
    steps = [Draws(torch.ones(2, dtype=torch.int64, device="cuda"), None) for _ in range(2)]  # type: ignore[arg-type]
    for drawn in range(3):
        feeds = []
        for row, cache in enumerate(caches):
            cache.rollback(0)
            cache.length = 20 + row
            tokens: list[Any] = [1, 2, 3]
            tokens[1 : 1 + drawn] = [DrawnToken(step, row) for step in steps[:drawn]]
            feeds.append(Feed(cache, tokens, 2, (0, 1), states=1))
        with Transfers() as transfers:  # type: ignore[no-untyped-call]
            output = decoder.forward(feeds)
        assert transfers.copies == 1, drawn
        assert output.states is not None
        assert (len(output.logits), len(output.states)) == (4, 2)


def test_what_a_replay_sends_does_not_grow_with_the_longest_text(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of 131,072 positions would be 8 KiB a tile, for each window of the layers."""
    recorder = Recorder()
    monkeypatch.setattr(graph, "capture", recorder)
    monkeypatch.setattr(graph, "_check", lambda *_: None)  # which compares numbers
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    sent = []
    for longest in (128, 131_072):
        decoder = decoder_on_device(copy.deepcopy(GEMMA))
        decoder._backends.current.windows = (4, None)
        graph.capture_passes(decoder._backends.current, 1, longest)
        for length in (3, 100):
            cache = decoder.reserve(128)
            assert cache is not None
            cache.length, replays = length, recorder.replays
            with Transfers() as transfers:  # type: ignore[no-untyped-call]
                decoder.forward([Feed(cache, [1], 1)])
            assert recorder.replays == replays + 1
            sent.append(transfers.sent)
    assert sent == [sent[0]] * 4
    assert 0 < sent[0] < 1024
