"""The second turn of a chat: what its first one computed is found, and copied into its extent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.gpu import pair
from benchmarks.gpu.pair import LeftOut, Measured
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import SequenceCache

# What the caller adds in a turn, in tokens; and room for what is not fed here.
_ADDED, _ROOM = 48, 96


@torch.inference_mode()
def measure(run: Run, until: Deadline) -> None:
    """The first token of such a turn with a cold and with a warm cache, for each model."""
    for of in run.models():
        for history in run.shapes.prompts:
            if not until.over and history + _ADDED < run.shapes.longest:
                run.attempt(f"{of.name}, prefixes", partial(_turns, run, of, history))


def _turns(run: Run, of: Measured, history: int) -> None:
    text = pair.tokens(history + _ADDED, run.shapes)
    line = f"{of.name}, {_ADDED} tokens after {history}"

    def turn(cache: SequenceCache, salt: str | None) -> None:
        first, chunk = cache.adopt(text, salt), of.limits.chunk_alone
        while first < len(text):
            last = first + chunk >= len(text)
            of.decoder.forward([Feed(cache, text[first : first + chunk], int(last))])
            first += chunk

    def timed(name: str, salt: str | None) -> None:
        with _text(of, len(text) + _ROOM) as cache:
            work, restore = partial(turn, cache, salt), partial(cache.rollback, 0)
            milliseconds, _ = run.stopwatch.times(work, restore, least=3, most=10, warm_ups=1)
            run.add(Figure(line, name, milliseconds, "ms", run.value(line, "cold")))

    timed("cold", None)
    with _text(of, history + _ROOM) as cache:
        cache.salt, cache.length = "", history
        cache.publish(text, history)
    timed("found", "")
    with _text(of, len(text) + _ROOM) as cache:
        milliseconds, host = run.stopwatch.times(
            partial(cache.adopt, text, ""), partial(cache.rollback, 0), least=3, most=10
        )
        bytes_ = 2 * cache.found * of.decoder.pool.bytes_per_position
        run.add(Figure(line, "its copy", milliseconds, "ms", 1e3 * bytes_ / run.bandwidth))
        run.add(Figure(line, "the copy's host", host, "ms"))
        if cache.found // of.decoder.pool.blocks.size != history // of.decoder.pool.blocks.size:
            raise LeftOut(f"{of.name}: {cache.found} of {history} tokens were found")
    of.decoder.forget_prefixes()


@contextmanager
def _text(of: Measured, capacity: int) -> Iterator[SequenceCache]:
    with of.texts(1, 0, capacity) as (cache,):
        yield cache
