"""Passes of each model beside their limit: texts, rows, trees, mixed steps, prompts, contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu import pair
from benchmarks.gpu.host import Host
from benchmarks.gpu.pair import Measured
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import SequenceCache

# Bars of issue 63, as multiples of the limit: by texts and rows, and of a tree of 64 nodes.
_BARS = {(1, 1): 1.3, (1, 17): 1.4, (1, 33): 1.4, (16, 5): 1.45, (16, 17): 1.8}
_BAR_OF_64 = 1.6
_BAR_OF_KV = 1.3
_BAR_OF_MIXED = 1.3
_DRAFTER_MS = 1.1
# Beside a prompt's chunk.
_BESIDE = 16
# Room of a text, beside its context: for the longest feed.
_ROOM = 96
# A prompt in more steps would take the section's time.
_MOST_STEPS = 40


class Passes:
    """Passes of one model, each figure with its limit.

    Attributes:
        name: of the model.

    Args:
        run: gets the figures.
        of: the model.
        until: nothing is begun afterwards.
    """

    def __init__(self, run: Run, of: Measured, until: Deadline) -> None:
        self.name = of.name
        self._run = run
        self._of = of
        self._until = until
        self._host = Host()
        name = f"passes, {of.name}"
        self._found = run.found.setdefault(name, {})

    def timed(
        self,
        key: str,
        work: Callable[[], object],
        restore: Callable[[], object],
        figure: Figure,
        **turns: int,
    ) -> None:
        """Measure one; the figure has all but the value. What does not fit is left out by name."""
        if self._until.over:
            self._run.left_out.append(f"{self._of.name}, {key}: no time")
            return

        def one() -> None:
            self._host.reset()
            with self._host.watching([self._of]):
                milliseconds, host = self._run.stopwatch.times(work, restore, **turns)
            kinds = self._host.of_passes()
            launched = any("launched" in kind for kind in kinds)
            mark = "L" if launched and self._run.shapes.real else ""
            own = replace(figure, value=milliseconds, mark=mark)
            self._run.add(own)
            self._found[key] = {
                "ms": milliseconds,
                "host_ms": host,
                "limit_ms": own.limit,
                "launched": launched,
            }

        self._run.attempt(f"{self._of.name}, {key}", one)

    def rows(self, texts: int, rows: Sequence[int], context: int, note: str = "") -> None:
        """Passes of texts with so many rows each."""
        of, run = self._of, self._run
        line = f"{of.name}, {texts} at {context}{note}"
        with of.texts(texts, context, _ROOM) as caches:
            for count in rows:
                feeds = [
                    Feed(cache, pair.tokens(count, run.shapes, seed), count)
                    for seed, cache in enumerate(caches, 1)
                ]
                limit = run.floor_ms(of, texts, count, context)
                figure = Figure(line, f"x{count}", 0.0, "ms", limit)
                if run.shapes.real and context == run.shapes.contexts[0] and not note:
                    if of.name == "target":
                        figure = replace(figure, bar=_BARS.get((texts, count)))
                    elif (texts, count) == (1, 1):
                        # The bar is in ms: the limit, 0.31, is not within reach.
                        figure = replace(figure, bar=_DRAFTER_MS / limit)
                self.timed(
                    f"{texts}x{count} at {context}{note}",
                    partial(_one_pass, of, feeds),
                    partial(_roll_back, caches, context),
                    figure,
                )

    def trees(self, texts: int, nodes: Sequence[int], context: int) -> None:
        """Passes over the last token and a binary tree, of each text."""
        of, run = self._of, self._run
        with of.texts(texts, context, _ROOM) as caches:
            for count in nodes:
                parents = tuple(place // 2 for place in range(1, count + 1))
                feeds = [
                    Feed(cache, pair.tokens(count + 1, run.shapes, seed), count + 1, parents)
                    for seed, cache in enumerate(caches, 1)
                ]
                limit = run.floor_ms(of, texts, count + 1, context)
                barred = run.shapes.real and of.name == "target" and (texts, count) == (1, 64)
                figure = Figure(f"{of.name}, trees", f"{texts} of {count}", 0.0, "ms", limit)
                self.timed(
                    f"{texts} trees of {count}",
                    partial(_one_pass, of, feeds),
                    partial(_roll_back, caches, context),
                    replace(figure, bar=_BAR_OF_64 if barred else None),
                )

    def mixed(self) -> None:
        """A prompt's chunk alone, and beside decoding texts."""
        of, run = self._of, self._run
        context, chunk = run.shapes.contexts[0], run.shapes.chunk
        line = f"{of.name}, chunk of {chunk}"
        with of.texts(_BESIDE + 1, context, chunk + _ROOM) as caches:
            *others, last = caches
            prompt = Feed(last, pair.tokens(chunk, run.shapes), 0)
            running = [Feed(cache, (5,), 1) for cache in others]
            restore = partial(_roll_back, caches, context)
            alone = Figure(line, "alone", 0.0, "ms", run.floor_ms(of, 1, chunk, context, 0))
            self.timed("chunk alone", partial(_one_pass, of, [prompt]), restore, alone)
            rows = chunk + _BESIDE
            limit = run.floor_ms(of, 1, rows, context, _BESIDE)
            together = Figure(line, f"beside {_BESIDE}x1", 0.0, "ms", limit)
            both = partial(_one_pass, of, [*running, prompt])
            self.timed("chunk beside", both, restore, together)
        ms, mixed = run.value(line, "alone"), run.value(line, f"beside {_BESIDE}x1")
        if ms and mixed:
            bar = _BAR_OF_MIXED if run.shapes.real and of.name == "target" else None
            run.add(Figure(line, "beside / alone", mixed, "ms", ms, bar))

    def prompt(self, length: int) -> None:
        """A whole prompt, in chunks as they are chosen, and in others."""
        of, run = self._of, self._run
        chosen = pair.chunks(of, ((_BESIDE, 1),))
        sizes = {chosen["alone"]: "as chosen alone"}
        sizes |= {size: "" for size in (512, 2048) if size not in sizes}
        sizes.setdefault(chosen[f"beside {_BESIDE}x1"], "as chosen beside 16")
        limit = run.floor_ms(of, 1, length, 0, 1)
        for size, note in sizes.items():
            if math.ceil(length / size) > _MOST_STEPS:
                continue
            # One position is taken as computed, or the whole extent would be cleared.
            with of.texts(1, 1, length + _ROOM) as (cache,):
                text = pair.tokens(length, run.shapes)
                feeds = [
                    Feed(cache, text[first : first + size], int(first + size >= length))
                    for first in range(0, length, size)
                ]
                self.timed(
                    f"prompt {length} by {size}{f' ({note})' if note else ''}",
                    partial(_one_by_one, of, feeds),
                    partial(cache.rollback, 1),
                    Figure(f"{of.name}, prompt of {length}", f"by {size}", 0.0, "ms", limit),
                    least=1,
                    most=3,
                    warm_ups=1,
                )


def _roll_back(caches: Sequence[SequenceCache], context: int) -> None:
    for cache in caches:
        cache.rollback(context)


def _one_pass(of: Measured, feeds: Sequence[Feed]) -> None:
    # By its name: the pass is wrapped while it is measured.
    of.decoder.forward(feeds)


def _one_by_one(of: Measured, feeds: Sequence[Feed]) -> None:
    for feed in feeds:
        of.decoder.forward([feed])


@torch.inference_mode()
def measure(run: Run, until: Deadline) -> None:
    """Short contexts: nothing is longer than the graphs' longest text, or they would be dropped."""
    shapes = run.shapes
    context = shapes.contexts[0]
    models = [Passes(run, of, until) for of in run.models()]
    for passes in models:
        for texts in shapes.texts:
            run.attempt(
                f"{passes.name}, {texts} texts", partial(passes.rows, texts, shapes.rows, context)
            )
        run.attempt(f"{passes.name}, trees", partial(passes.trees, 1, shapes.trees, context))
        run.attempt(f"{passes.name}, trees", partial(passes.trees, 16, (16,), context))
        run.attempt(f"{passes.name}, mixed", passes.mixed)
    for length in shapes.prompts:
        if length < shapes.longest:
            for passes in models:
                run.attempt(f"{passes.name}, prompt", partial(passes.prompt, length))


@torch.inference_mode()
def measure_long(run: Run, until: Deadline) -> None:
    """Long contexts, with graphs captured for them."""
    for of in run.models():
        run.attempt(f"{of.name}, long", partial(_long, run, of, until))


def _long(run: Run, of: Measured, until: Deadline) -> None:
    shapes, passes = run.shapes, Passes(run, of, until)
    short, *longer = shapes.contexts
    of.capture(max(longer) + 1024)
    note = ", long graphs"
    for texts in (1, 16):
        passes.rows(texts, (1,), short, note)
    for context in longer:
        for texts in (1, 4, 16):
            if texts * (context + 2 * _ROOM) <= of.decoder.positions:
                rows = (1, 5, 17) if texts == 1 else (1, 5)
                run.attempt(f"context {context}", partial(passes.rows, texts, rows, context))
        _attention(run, of, context, f"{of.name}, 1 at {short}{note}")
    for length in shapes.prompts:
        if length >= shapes.longest:
            run.attempt(f"{of.name}, prompt", partial(passes.prompt, length))


def _attention(run: Run, of: Measured, context: int, short_line: str) -> None:
    """What the context adds to a pass of one row, beside reading its keys and values."""
    long, short = run.value(f"{of.name}, 1 at {context}", "x1"), run.value(short_line, "x1")
    if long is None or short is None:
        return
    positions = context - run.shapes.contexts[0]
    limit = 1e3 * positions * of.decoder.pool.bytes_per_position / run.bandwidth
    last = run.shapes.real and context == run.shapes.contexts[-1] and of.name == "target"
    bar = _BAR_OF_KV if last else None
    run.add(Figure(f"{of.name}, attention", f"at {context}", long - short, "ms", limit, bar))
