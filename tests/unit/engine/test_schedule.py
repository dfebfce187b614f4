"""Who shares a step: prompts take a chunk in the mean, and who drafts goes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.asks import Draw, Score, Steps, Take
from tandem.engine.job import Job
from tandem.engine.schedule import BatchLimits, saved_behind, select
from tandem.inference.feed import Feed
from tandem.profile import Profile

CHUNK = 32
# A row takes 3 us, and a pass 128 us in any case.
_PASSES = [(1, 1, 128e3), (16, 1, 128e3), (16, 17, 128e3 + 271 * 3e3)]
LIMITS = BatchLimits(prefill_share=0.75, profile=Profile(_PASSES))

# The cache of a prompt of which nothing is computed.
_AT_ITS_BEGINNING: Any = SimpleNamespace(length=0)


def _asks(ask: Any) -> Steps[None]:
    yield ask


def job_of(asks: Steps[None]) -> Job[Any]:
    """A job that waits for a step; nobody awaits it."""
    job: Job[Any] = Job(None, asks)
    job.resume()
    return job


def prompt(tokens: int, depth: int = 0) -> Job[Any]:
    """A prompt with so many tokens left after as many as its depth."""
    cache: Any = SimpleNamespace(length=depth)
    return job_of(_asks(Take(None, Feed(cache, [1] * tokens, 1))))  # type: ignore[arg-type]


def running(rows: int = 1) -> Job[Any]:
    return job_of(_asks(Score(None, Feed(None, [1] * rows, rows))))  # type: ignore[arg-type]


class Load:
    """Prompts beside running sequences, step by step.

    Attributes:
        chunks: prompt tokens of each step so far.
        firsts: the step that completed each prompt.
    """

    def __init__(self, runners: int, saved: int = LIMITS.most_saved) -> None:
        self._runners = [running() for _ in range(runners)]
        self._prompts: list[Job[Any]] = []
        self._saved = saved
        self.chunks: list[int] = []
        self.firsts: dict[Job[Any], int] = {}

    def come(self, *tokens: int) -> None:
        self._prompts += [prompt(count) for count in tokens]

    def step(self) -> None:
        opened = len(self._runners) + len(self._prompts)
        jobs = [*self._runners, *self._prompts]
        batch = select(jobs, opened, LIMITS, self._saved)
        assert all(runner in batch for runner in self._runners), "who runs waits for no step"
        self._saved = saved_behind(batch, jobs, self._saved, LIMITS)
        taking = [job for job in batch if job.opening]
        self.chunks.append(sum(job.chunk for job in taking))
        for job in taking:
            assert isinstance(job.ask, Take)
            job.ask.taken += job.chunk
            if not job.ask.left:
                self.firsts[job] = len(self.chunks)
                self._prompts.remove(job)

    def until_done(self) -> None:
        while self._prompts:
            self.step()


@pytest.mark.parametrize("runners", [0, 1, 8])
def test_sixteen_short_prompts_are_computed_within_two_steps(runners: int) -> None:
    """The first one comes alone, as they do; the others while it is computed."""
    load = Load(runners)
    load.come(12)
    load.step()
    load.come(*[12] * 15)
    load.until_done()
    assert sorted(load.firsts.values()) == [1, *[2] * 15]


def test_a_burst_of_short_prompts_takes_full_steps_until_it_is_through() -> None:
    """And no larger ones, however many wait."""
    load = Load(4)
    load.come(*[60] * 200)
    for _ in range(25):
        load.step()
    assert all(LIMITS.chunk_alone - 60 < chunk <= LIMITS.chunk_alone for chunk in load.chunks)


def test_of_equal_prompts_the_first_are_through_while_the_others_wait() -> None:
    """Nothing is saved: each step takes a chunk and no more."""
    load = Load(8, saved=0)
    load.come(*[2 * CHUNK] * 6)
    load.until_done()
    assert sorted(load.firsts.values()) == [2, 4, 6, 8, 10, 12]


def test_short_prompts_have_their_part_of_the_time_by_number() -> None:
    beside = [running() for _ in range(4)]
    # The four take 128 us and 3 us for each row after the first.
    chunks = [LIMITS.chunk_beside(beside, [prompt(60)] * count) for count in (0, 3, 4, 8, 12, 99)]
    assert chunks == [CHUNK, CHUNK, 43, 85, 128, LIMITS.chunk_alone]


def test_a_long_prompt_delays_others_by_a_chunk_a_step() -> None:
    """Nothing was saved for it, however quiet it was before."""
    load = Load(8)
    load.come(4000)
    load.until_done()
    assert max(load.chunks) == CHUNK
    assert len(load.chunks) == 4000 // CHUNK


def test_short_prompts_without_end_wait_until_they_are_as_many_as_their_part() -> None:
    """Fewer take a chunk a step in the mean, which is less than what comes."""
    load = Load(16)
    for step in range(1, 401):
        load.come(25, 25)
        load.step()
        if len(load._prompts) < 16 * LIMITS.prefill_share:
            assert sum(load.chunks) <= step * CHUNK + LIMITS.most_saved
        assert len(load._prompts) <= 20
    assert max(load.chunks) <= 2 * CHUNK


def test_a_long_prompt_goes_on_beside_short_ones_without_end() -> None:
    load = Load(4)
    load.come(640)
    (long,) = load._prompts
    for _ in range(640 // (CHUNK // 2)):
        load.come(20, 20, 20)
        load.step()
    assert long in load.firsts, "half of each chunk is the oldest one's"


def test_where_nobody_runs_a_prompt_takes_as_much_as_may_be_saved() -> None:
    load = Load(0)
    load.come(1000)
    load.until_done()
    # 427 rows take ten times as long as the pass in any case.
    assert LIMITS.chunk_alone == 3 * 128, "whole tiles"
    assert load.chunks == [384, 384, 232]


@pytest.mark.parametrize(("sequences", "rows", "chunk"), [(1, 1, 16), (1, 5, 19), (8, 5, 45)])
def test_a_chunk_is_a_share_of_the_pass_that_it_delays(
    sequences: int, rows: int, chunk: int
) -> None:
    """Passes of a CPU: 5 ms, and a quarter of one for each row after the first."""
    passes = [(1, 1, 5e6), (1, 17, 9e6), (16, 1, 8.75e6), (16, 17, 72.75e6)]
    limits = BatchLimits(prefill_share=0.75, profile=Profile(passes))
    beside = [running(rows) for _ in range(sequences)]
    assert limits.chunk_beside(beside) == pytest.approx(chunk, abs=1)
    assert BatchLimits(prefill_chunk=7, profile=limits.profile).chunk_beside(beside) == 7


# Of an H100, a target of 8 B: 7.7 ms a row alone; passes of more than sixteen rows a text are not
# captured, and the first of a prompt's rows are nearly free (gpu.md, M).
_H100 = {
    (1, 1): 7.7, (1, 5): 8.3, (1, 16): 8.5, (1, 17): 11.9, (1, 256): 13.0, (1, 1984): 68.0,
    (4, 1): 8.0, (4, 5): 8.4, (4, 16): 9.0, (4, 17): 23.5,
    (16, 1): 9.0, (16, 5): 10.1, (16, 16): 12.0, (16, 17): 32.9,
}  # fmt: skip


def test_a_chunk_on_a_device_follows_the_rows_of_prompts() -> None:
    """And not the cliff after captured passes, which is no cost of a row."""
    profile = Profile([(*shape, 1e6 * ms) for shape, ms in _H100.items()])
    limits, longer = BatchLimits(profile=profile), BatchLimits(prefill_share=0.75, profile=profile)
    beside = [running()] * 16
    assert limits.chunk_beside(beside) == 240
    assert limits.chunk_beside(beside) < longer.chunk_beside(beside) <= 400
    assert BatchLimits(prefill_share=1.5, profile=profile).chunk_beside(beside) == 512
    assert limits.chunk_alone == 2048
    for factor in (0.95, 1.05):  # another start measures the rows of prompts a little otherwise
        noisy = [
            (*shape, 1e6 * ms * (factor if shape[1] > 99 else 1)) for shape, ms in _H100.items()
        ]
        again = BatchLimits(prefill_share=0.75, profile=Profile(noisy)).chunk_beside(beside)
        assert again == pytest.approx(longer.chunk_beside(beside), rel=0.15)
        assert BatchLimits(profile=Profile(noisy)).chunk_beside(beside) >= 150


def test_a_chunk_is_bounded_where_rows_cost_nothing() -> None:
    limits = BatchLimits(token_budget=300, profile=Profile([(1, 1, 8e6), (16, 17, 8e6)]))
    assert (limits.chunk_beside([running()]), limits.chunk_alone) == (300, 2048)


def draw_of(scorer: Any) -> Draw:
    none: Any = None
    return Draw(scorer, Feed(none, [1], 1), none, none, 5, none, 1, 0, 4)


class DraftingTexts:
    """Texts that draft by a small model and score by a large one, in the same engine.

    Attributes:
        steps: of each step, the model that computed, and how many texts shared it.

    Args:
        drafted: by each text in the round that is on.
    """

    GAMMA = 4

    def __init__(self, drafted: list[int]) -> None:
        self.steps: list[tuple[str, int]] = []
        self._small, self._large = object(), object()
        self.jobs = [job_of(self._rounds(tokens)) for tokens in drafted]

    def _rounds(self, drafted: int) -> Steps[None]:
        large: Any = self._large
        while True:
            for _ in range(drafted, self.GAMMA):
                yield draw_of(self._small)
            drafted = 0
            yield Score(large, Feed(None, [1], 1))  # type: ignore[arg-type]

    def step(self) -> None:
        batch = select(self.jobs, len(self.jobs), LIMITS)
        scorers: list[Any] = [job.ask.scorer for job in batch]  # type: ignore[union-attr]
        assert len({id(scorer) for scorer in scorers}) == 1, "a step of one model"
        self.steps.append(("small" if scorers[0] is self._small else "large", len(batch)))
        for job in batch:
            if job.opening:
                assert isinstance(job.ask, Take)
                job.ask.taken += job.chunk
            if not (job.opening and job.tokens):
                job.resume()


@pytest.mark.parametrize("drafted", [[0, 1, 2, 3, 4, 4], [4, 0], [2, 2, 4, 4, 4]])
def test_texts_that_draft_inside_fall_into_step(drafted: list[int]) -> None:
    """Draws come before a pass of the large model, which all then share, now and ever after."""
    texts, count = DraftingTexts(drafted), len(drafted)
    while "large" not in dict(texts.steps):
        texts.step()
    assert texts.steps.pop() == ("large", count)
    assert len(texts.steps) == texts.GAMMA - min(drafted)
    texts.steps.clear()
    for _ in range(3 * (texts.GAMMA + 1)):
        texts.step()
    assert texts.steps == [*[("small", count)] * texts.GAMMA, ("large", count)] * 3


def test_prompts_of_the_large_model_wait_for_draws_and_not_for_ever() -> None:
    texts = DraftingTexts([0, 0])
    large: Any = texts._large
    take = Take(large, Feed(_AT_ITS_BEGINNING, [1] * 3 * CHUNK, 1))
    texts.jobs.append(job_of(_asks(take)))
    for _ in range(3 * (texts.GAMMA + 1)):
        texts.step()
    assert texts.steps == [*[("small", 2)] * texts.GAMMA, ("large", 3)] * 3
    assert not take.left


def test_chunks_shrink_as_attention_looks_back_further() -> None:
    """A row after as many positions as the span takes twice as long."""
    profile = Profile([(1, 1, 1e6), (1, 101, 2e6)])
    limits = BatchLimits(prefill_share=0.75, profile=profile, span=1000)
    beside = [running()]
    assert limits.chunk_beside(beside) == 75
    assert limits.chunk_beside(beside, [prompt(9999, depth=1000)]) == 38
    assert limits.chunk_beside(beside, [prompt(9999, depth=1_000_000)]) == 1
    fixed = BatchLimits(prefill_chunk=75, span=1000)
    assert fixed.chunk_beside(beside, [prompt(9999, depth=1000)]) == 75
