"""How large a KV pool is made, by what a device says of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import StartupError
from tandem.inference import decoder as decoders
from tandem.inference.decoder import DecoderOptions
from tandem.inference.feed import Feed
from tandem.inference.kv import size
from tandem.inference.kv.size import RESERVED, Room, cache_size
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import Backend
from tandem.inference.passes.largest import LargestPass, memory_of_passes
from tandem.lengths import ANY_LENGTH
from tests.support.decoders import decoder_over
from tests.support.models.tiny import random_llama

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
# One layer of two heads of 8, keys and values, float32.
EACH = 128


def device_with(
    monkeypatch: pytest.MonkeyPatch, free: int, total: int = 80 * GIB, held: int = 0
) -> None:
    monkeypatch.setattr(size, "free_memory", lambda device: free)
    monkeypatch.setattr(size, "memory_held", lambda device: (held, total))


@pytest.mark.parametrize(
    ("free", "held", "share", "passes", "takes"),
    [
        # All that the passes leave.
        (60 * GIB, 20 * GIB, 1.0, 3 * GIB, 57 * GIB),
        # A part of the device, weights included.
        (60 * GIB, 20 * GIB, 0.5, 3 * GIB, 17 * GIB),
        # What is free, where others have taken more than their part.
        (10 * GIB, 20 * GIB, 0.5, 3 * GIB, 7 * GIB),
    ],
)
def test_a_gpus_pool_takes_what_weights_and_passes_leave(
    monkeypatch: pytest.MonkeyPatch, free: int, held: int, share: float, passes: int, takes: int
) -> None:
    device_with(monkeypatch, free, held=held)
    found = cache_size(CUDA, EACH, Room(0, ANY_LENGTH, share, passes))
    assert found * EACH == takes - RESERVED
    # And no more than its sequences can use, nor than is asked for.
    assert cache_size(CUDA, EACH, Room(0, 1000, share, passes)) == 1000
    assert cache_size(CUDA, EACH, Room(found, 1000, share, passes)) == found
    with pytest.raises(StartupError, match="within MEMORY_SHARE; lower CACHE_TOKENS"):
        cache_size(CUDA, EACH, Room(found + 1, 1000, share, passes))
    assert cache_size(CUDA, EACH, Room(0, ANY_LENGTH, share, passes, kept=100)) == found - 100
    # Where there are to be several such pools.
    assert cache_size(CUDA, EACH, Room(0, ANY_LENGTH, share, passes, pools=4)) == found // 4
    assert cache_size(CUDA, EACH, Room(found // 2, 1000, share, passes, pools=4)) == found // 2


def test_a_gpu_has_room_for_later_weights_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there are any: later ones would be refused for ever."""
    device_with(monkeypatch, RESERVED + 10 * GIB)
    room = Room(0, ANY_LENGTH, weights=2 * GIB, pools=4)
    assert cache_size(CUDA, EACH, room) == 2 * GIB // EACH
    most = 4 * GIB // EACH
    assert cache_size(CUDA, EACH, room._replace(cache_tokens=most)) == most
    with pytest.raises(StartupError, match=r"ONLINE: .* take 8.0 GiB, .*lower CACHE_TOKENS, raise"):
        cache_size(CUDA, EACH, room._replace(cache_tokens=most + 1))
    with pytest.raises(StartupError, match=r"later weights of 10.0 GiB .* or set ONLINE=0"):
        cache_size(CUDA, EACH, room._replace(weights=10 * GIB))


def test_services_that_share_a_device_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is first: each has its weights there, and sees the other's pool or not."""
    weights = {0.75: 15 * GIB, 0.25: 1 * GIB}
    for first, second in ((0.75, 0.25), (0.25, 0.75)):
        free, pools = 80 * GIB - sum(weights.values()), 0
        for share in (first, second):
            device_with(monkeypatch, free - pools, held=weights[share])
            pools += EACH * cache_size(CUDA, EACH, Room(0, ANY_LENGTH, share, GIB))
        assert pools == free - 2 * GIB - 2 * RESERVED


@pytest.mark.parametrize("free", [0, GIB, 4 * GIB - 1])
def test_a_gpu_without_room_is_refused(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    device_with(monkeypatch, free)
    with pytest.raises(StartupError, match=r"no memory for a KV cache: cuda has \d\.\d GiB free"):
        cache_size(CUDA, EACH, Room(0, ANY_LENGTH, 1.0, 3 * GIB))
    with pytest.raises(StartupError, match="raise MEMORY_SHARE"):
        cache_size(CUDA, EACH, Room(0, ANY_LENGTH, 0.1, 3 * GIB))


def test_a_cpu_keeps_half_and_divides_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device_with(monkeypatch, 1000 * EACH)
    assert cache_size(CPU, EACH, Room(0, 10_000)) == 500
    assert cache_size(CPU, EACH, Room(0, 10_000, 0.7)) == 350
    assert cache_size(CPU, EACH, Room(0, 300, 0.7)) == 300
    # What is asked for is not divided.
    assert cache_size(CPU, EACH, Room(800, 0, 0.7)) == 800
    with pytest.raises(StartupError, match="lower CACHE_TOKENS"):
        cache_size(CPU, EACH, Room(801, 0))
    device_with(monkeypatch, EACH)
    with pytest.raises(StartupError, match="no memory for a KV cache"):
        cache_size(CPU, EACH, Room(0, 300))


class Counters:
    """In place of `torch.cuda`'s: what is held, and was at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached, self.held, self.peak = 7, 100, 500
        for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.held + self.cached)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - self.cached, 4000))

    def empty_cache(self) -> None:
        self.cached = 0

    def synchronize(self, device: torch.device) -> None:
        pass

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.held + self.cached

    def allocate(self) -> None:
        self.peak = max(self.peak, self.held + 40)


def test_a_devices_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that torch has cached are free, and what was held at a peak before is no reading."""
    counters = Counters(monkeypatch)
    assert size.memory_during(CUDA, counters.allocate) == 40
    counters.cached = 7
    assert size.free_memory(CUDA) == 1000
    assert (size.memory_left(CUDA, 1.0), size.memory_left(CUDA, 0.2)) == (1000, 700)


class Readings:
    """In place of a device's counters: what each of the passes is said to take."""

    def __init__(self, *taken: int) -> None:
        self.taken = list(taken)
        self.rows: list[int] = []

    def __call__(self, device: torch.device, run: Callable[[], Any]) -> int:
        made = run()
        rows = getattr(made, "logits", made)
        assert rows.isfinite().all()
        self.rows.append(len(rows))
        return self.taken.pop(0)


@pytest.mark.parametrize(
    ("sizes", "longest", "free", "taken", "rows", "behind"),
    [
        # The passes are at the end of the longest text; captured ones keep their results too.
        (LargestPass(40, 24, 16), 100, GIB, 1000 + 2 * 200, [24, 16], [60, 84]),
        # Half of the memory holds 50 positions.
        (LargestPass(40, 24, 16), 100, 2 * EACH * 50, 1400, [24, 16], [10, 34]),
        # Half of it holds less than the pass.
        (LargestPass(40, 24, 60), 100, EACH, 1400, [24, 60], [20, 0]),
        # No text is as long.
        (LargestPass(40, 40, 16), 30, GIB, 1400, [30, 16], [0, 14]),
        (LargestPass(40, 24), 100, GIB, 1000, [24], [60]),
    ],
)
def test_the_largest_passes_are_measured_behind_long_texts(
    monkeypatch: pytest.MonkeyPatch,
    sizes: LargestPass,
    longest: int,
    free: int,
    taken: int,
    rows: list[int],
    behind: list[int],
) -> None:
    decoder = decoder_over(random_llama(1), "largest", cache_tokens=64, engine="torch")
    forward, seen, readings = Backend.forward, list[int](), Readings(1000, 200)

    def told(self: Backend, feeds: Sequence[Feed]) -> PassOutput:
        seen.append(feeds[0].cache.length)
        return forward(self, feeds)

    monkeypatch.setattr(Backend, "forward", told)
    # Of twice as much half is this service's.
    device_with(monkeypatch, 4 * free, total=4 * free, held=free)
    monkeypatch.setattr(size, "memory_during", readings)
    with torch.inference_mode():
        assert memory_of_passes(decoder.backend, sizes, longest, 0.5) == taken
    assert (readings.rows, seen) == (rows, behind)
    assert decoder.free_positions == 64  # that pool is another one


def test_a_pass_that_does_not_fit_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_over(random_llama(1), "largest", cache_tokens=64, engine="torch")

    def full(device: torch.device, run: Callable[[], Any]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(size, "memory_during", full)
    with pytest.raises(StartupError, match=r"no room for a pass of 40 tokens .* TOKEN_BUDGET"):
        memory_of_passes(decoder.backend, LargestPass(40, 24), 100)


@pytest.mark.parametrize(
    ("device", "one_call", "cache_tokens", "asked"),
    [
        ("cpu", False, 0, None),
        ("cuda", True, 0, (LargestPass(40, 24, 16), 512, 0.5)),
        ("cuda", True, 90, (LargestPass(40, 24, 16), 90, 0.5)),
        ("cuda", False, 0, (LargestPass(40, 24), 512, 0.5)),
    ],
)
def test_a_decoder_measures_before_it_makes_its_pool(
    monkeypatch: pytest.MonkeyPatch, device: str, one_call: bool, cache_tokens: int, asked: Any
) -> None:
    own = decoder_over(random_llama(1), "room", cache_tokens=64, engine="torch")
    own.device, own.backend.in_one_call, told = torch.device(device), one_call, list[Any]()

    def taken(backend: Backend, *sizes: Any) -> int:
        told.append(sizes)
        return 77

    monkeypatch.setattr(decoders, "memory_of_passes", taken)
    options = DecoderOptions(
        cache_tokens, 10, share=0.5, largest=LargestPass(40, 24), graph_rows=16, longest=ANY_LENGTH
    )
    own._options = options
    room = own._room(own.backend)
    assert told == ([] if asked is None else [asked])
    assert room == Room(cache_tokens, 512, 0.5, 0 if asked is None else 77)
    own._options = replace(options, renews=True)
    assert own._room(own.backend) == (
        room._replace(pools=2)
        if asked is None
        else room._replace(weights=own._weight_bytes, pools=4)
    )
    assert own._weight_bytes == 4 * own.about.parameters


def test_a_cpus_pool_leaves_room_for_that_of_later_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the memory is for other programs."""
    device_with(monkeypatch, 16 * GIB)
    assert cache_size(CPU, EACH, Room(0, ANY_LENGTH)) * EACH == 8 * GIB
    assert cache_size(CPU, EACH, Room(0, ANY_LENGTH, pools=2)) * EACH == 4 * GIB


@pytest.mark.parametrize(("device", "takes"), [("cuda", 64 * EACH), ("cpu", 2 * 64 * EACH)])
def test_later_weights_are_read_where_they_have_room(
    monkeypatch: pytest.MonkeyPatch, device: str, takes: int
) -> None:
    """Beside passes, and within the share of a device; of a CPU half stays free."""
    own = decoder_over(random_llama(1), "room", cache_tokens=64, engine="torch")
    own.device, own.pass_memory = torch.device(device), 70
    own._options = DecoderOptions(share=0.5)
    needed = own._weight_bytes + 70 + takes
    held, total = 1000, 2 * (needed + 1000) if device == "cuda" else 0
    device_with(monkeypatch, needed + (1 << 20) * (device == "cuda"), total=total, held=held)
    own._require_room(own._backends.serving, own._weight_bytes)

    def full() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    with pytest.raises(MemoryError, match=r"^CUDA out of memory$"):
        own.renewed(full)
    device_with(monkeypatch, needed - 1 if device == "cpu" else GIB, total=total - 2, held=held)
    with pytest.raises(MemoryError, match=r"KV cache of 64 tokens and 0.0 GiB of weights: c"):
        own.renewed(lambda: pytest.fail("it was read"))


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"max": "1000", "current": "900", "stat": "anon 500\ninactive_file 300\nfile 350\n"}, 400),
        ({"max": "1000", "current": "900", "stat": "anon 500\n"}, 100),
        ({"max": "1000", "current": "900"}, 100),
        ({"max": "max", "current": "900", "stat": "inactive_file 300\n"}, None),
        ({}, None),
    ],
)
def test_in_a_container_files_that_are_not_in_use_are_free(
    files: dict[str, str], free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a checkpoint that was just read. Without a limit the machine's memory counts."""
    for name, content in files.items():
        (tmp_path / f"memory.{name}").write_text(content)
    monkeypatch.setattr(size, "_CGROUP", tmp_path)
    monkeypatch.setattr(size, "_free_in_machine", lambda: 10**9)
    assert size.free_memory(torch.device("cpu")) == (10**9 if free is None else free)
