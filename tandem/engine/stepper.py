"""One step of the engine: the asks of all its jobs, answered together."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.engine.answers import DeviceVerdict, ScoredRows
from tandem.engine.asks import (
    Decide,
    Draw,
    DrawTogether,
    ReadLogProbs,
    ReadTokens,
    Report,
    Review,
    Score,
    Take,
    ToHost,
    ToHostTogether,
)
from tandem.engine.clock import clock_of
from tandem.engine.job import Job
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.engine.numbers.draws import draw, drawn_on, follows, not_finite
from tandem.engine.numbers.home import drafts_of, tokens_of
from tandem.engine.numbers.log_probs import log_probs_of
from tandem.engine.numbers.reviews import review
from tandem.engine.scorer import Scorer
from tandem.inference.feed import DrawnToken, Feed
from tandem.inference.output import PassOutput
from tandem.telemetry.stages import StageTimes
from tandem.telemetry.tracing.spans import write
from tandem.telemetry.tracing.steps import PassRecord

_PASSES = (Take, Score, Draw, DrawTogether, Review)
_Jobs = Sequence[Job[Any]]


class Stepper:
    """Answers asks by scorers, mostly of one device.

    Attributes:
        ahead: whether the device works by itself, while the host does something else.

    Args:
        device: of the first one; its clock times the steps.
        passes_elsewhere: whether the passes are computed by other threads than torch's, now.
            Torch's would be woken for the numbers between two passes alone, which on a busy machine
            takes a time slice (3 ms instead of 0.1).
    """

    def __init__(
        self, device: torch.device, passes_elsewhere: Callable[[], bool] = lambda: False
    ) -> None:
        self._device = device
        self._passes_elsewhere = passes_elsewhere
        self.ahead = device.type == "cuda"
        self._clock = clock_of(device)
        # Steps whose times are not known yet: a device may be computing them; and those that it has
        # computed, with the time when their results were there.
        self._unbooked: list[_Step] = []
        self._due: list[tuple[Sequence[_Step], int]] = []

    def answers(self) -> bool:
        """Whether the device still works."""
        try:
            return bool(torch.ones(1, device=self._device).item() == 1)
        except RuntimeError:
            return False

    @torch.inference_mode()
    def step(self, jobs: _Jobs, meanwhile: Callable[[], None] = lambda: None) -> None:
        """See `StepRunner`."""
        if self._passes_elsewhere() and torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # of the calling thread
        tokens = 0
        if any(job.traced is not None for job in jobs):
            tokens = sum(job.chunk if job.opening else job.tokens for job in jobs)
        started = self._clock.stamp()
        passes = []
        for scorer, sharing in _by_scorer(jobs):
            feeds = [_feed_of(job) for job in sharing]
            passes.append((sharing, feeds, scorer.forward(feeds)))
        times = [job.times for job in jobs]  # a job that reports, or ends a lap, begins new ones
        step = _Step(jobs, times, tokens, [started, self._clock.stamp()])
        drawing = [one for each in passes for one in _hand_out(*each)]
        if chained := [one for one in drawing if one.follows]:
            step = self._draw_on(step, chained)
        _hand_drawn(drawing)
        waited = False
        while (kind := _next_kind(jobs)) is not None:
            if kind in _WAITING:
                waited = True
                meanwhile()
            _ANSWERS[kind]([(job, job.ask) for job in jobs if type(job.ask) is kind])
        step.stamps.append(self._clock.stamp())
        self._unbooked.append(step)
        # An idle job's pass is waited for: a text that comes meanwhile waits for that one alone.
        ended = any(job.over or job.idle for job in jobs)
        if ended or any(job.reports for job in jobs):
            self._due.append((self._unbooked, time.perf_counter_ns() if waited else 0))
            self._unbooked = []
            if ended or not self.ahead:
                self.settle()

    def _draw_on(self, step: _Step, chained: Sequence[_Drawing]) -> _Step:
        """Draw the chains' next tokens as far as the host is not needed. They are booked as a step
        of their own, which is returned; the step itself if nothing was drawn."""
        began, tokens = self._clock.stamp(), 0
        for together in _by_kind(chained, lambda one: (id(one.ask.scorer), *one.kind)):
            asks, firsts = [one.ask for one in together], [one.answer[0] for one in together]
            drawn = drawn_on(asks[0].scorer, asks, firsts)
            for one, behind in zip(together, drawn, strict=True):
                one.answer += behind
                tokens += len(behind)
        if not tokens:
            return step
        step.stamps.append(began)
        self._unbooked.append(step)
        jobs = [one.job for one in chained]
        traced = any(job.traced is not None for job in jobs)
        stamps = [began, self._clock.stamp()]
        # All jobs of the step wait for them.
        return _Step(jobs, step.times, tokens if traced else 0, stamps)

    def settle(self) -> None:
        """See `StepRunner`."""
        due, self._due = self._due, []
        for steps, ended_ns in due:
            stamps = [stamp for step in steps for stamp in step.stamps]
            stamped = iter(self._clock.times(stamps, ended_ns))
            for step in steps:
                start_ns, passed_ns, end_ns = next(stamped), next(stamped), next(stamped)
                for booked in step.times:
                    booked.computed(start_ns, passed_ns, end_ns)
                    booked.batch_size = len(step.jobs)
                if served := [job.traced for job in step.jobs if job.traced is not None]:
                    write(PassRecord(served, start_ns, passed_ns, len(step.jobs), step.tokens))


@dataclass(slots=True)
class _Step:
    """What is known of a step when it has been launched.

    Attributes:
        jobs: that it computed for.
        times: of those that waited for it, when it began.
        tokens: new ones that they fed; 0 where no job is traced.
        stamps: its beginning, the end of its passes, its end.
    """

    jobs: _Jobs
    times: Sequence[StageTimes]
    tokens: int
    stamps: list[Any]


def _next_kind(jobs: _Jobs) -> type[Any] | None:
    """The kind of asks that is answered next, the first of `_ANSWERS` that any job waits for; None
    if there is none."""
    asked = {type(job.ask) for job in jobs}
    return next((kind for kind in _ANSWERS if kind in asked), None)


def _by_scorer(jobs: _Jobs) -> Iterator[tuple[Scorer, _Jobs]]:
    """The jobs of one pass each."""
    sharing: dict[int, tuple[Scorer, list[Job[Any]]]] = {}
    for job in jobs:
        assert isinstance(job.ask, _PASSES)  # nothing else waits between two steps
        scorer = job.ask.scorer
        sharing.setdefault(id(scorer), (scorer, []))[1].append(job)
    yield from sharing.values()


def _feed_of(job: Job[Any]) -> Feed:
    ask = job.ask
    assert isinstance(ask, _PASSES)
    if not isinstance(ask, Take):
        return ask.feed
    return ask.chunk(job.chunk)


def _hand_out(jobs: _Jobs, feeds: Sequence[Feed], output: PassOutput) -> Sequence[_Drawing]:
    """Give each job of a pass its rows; what is drawn from them is not handed out yet."""
    logits, first = output.logits, 0
    first_state = 0
    drawing: list[_Drawing] = []
    reviewing: list[tuple[Job[Any], Review, int]] = []
    for job, feed in zip(jobs, feeds, strict=True):
        ask, own = job.ask, first_state
        first_state += feed.states
        if isinstance(ask, Draw):
            drawing.append(_Drawing(job, ask, first))
        elif isinstance(ask, DrawTogether):
            rows = ask.firsts(first)
            drawing += [_Drawing(job, *one) for one in zip(ask.draws, rows, strict=True)]
        elif isinstance(ask, Review):
            reviewing.append((job, ask, first))
        if isinstance(ask, (Draw, DrawTogether, Review)):
            first += feed.rows
            continue
        if isinstance(ask, Take):
            ask.taken += job.chunk
            if output.states is not None and feed.states:
                ask.states.append(output.states[own:first_state])
            if ask.left:
                continue
        assert isinstance(ask, (Take, Score))
        scored = ScoredRows(logits, first, ask.feed.rows)
        if ask.feed.states:
            scored.prompt_states = ask.feed.states - ask.feed.rows
            if isinstance(ask, Take):
                scored.states = torch.cat(ask.states)
            else:
                scored.states, scored.first_state = output.states, own
        job.resume(scored)
        first += ask.feed.rows
    _review(reviewing, logits)
    _draw(drawing, logits)
    return drawing


def _review(reviewing: Sequence[tuple[Job[Any], Review, int]], logits: Tensor) -> None:
    """Answer all whose drafts are reviewed."""
    if reviewing:
        answers = review([ask for _, ask, _ in reviewing], logits, [at for *_, at in reviewing])
        for (job, *_), answer in zip(reviewing, answers, strict=True):
            job.resume(not_finite("drafter") if answer is None else answer)


def _draw(drawing: Sequence[_Drawing], logits: Tensor) -> None:
    """Draw for all."""
    for chosen in _by_kind(drawing, lambda one: one.kind):
        drawn = draw([one.ask for one in chosen], logits, [one.row for one in chosen])
        for one, answer in zip(chosen, drawn, strict=True):
            one.answer = answer
            # One of several at once stands on a branch, where a chain in one replay does not go.
            one.follows = isinstance(one.job.ask, Draw) and follows(one.ask, logits)


def _by_kind(
    drawing: Sequence[_Drawing], kind: Callable[[_Drawing], Hashable]
) -> Iterable[Sequence[_Drawing]]:
    """Those that can be drawn together."""
    by_kind: dict[Hashable, list[_Drawing]] = {}
    for one in drawing:
        by_kind.setdefault(kind(one), []).append(one)
    return by_kind.values()


def _hand_drawn(drawing: Sequence[_Drawing]) -> None:
    """Answer all that draw."""
    answers: dict[Job[Any], list[list[DrawnToken]]] = {}
    for one in drawing:
        answers.setdefault(one.job, []).append(one.answer)
    for job, each in answers.items():
        job.resume(each if isinstance(job.ask, DrawTogether) else each[0])


@dataclass(slots=True)
class _Drawing:
    """A draw, alone or among others of its job.

    Attributes:
        job: that asks.
        ask: what is drawn.
        row: its first one of the pass.
        answer: the tokens, once they are drawn.
        follows: whether a chain may go on after them without the host.
    """

    job: Job[Any]
    ask: Draw
    row: int
    answer: list[DrawnToken] = field(default_factory=list)
    follows: bool = False

    @property
    def kind(self) -> tuple[float, int, bool, bool]:
        """What draws that are made together have in common. At temperature 0, siblings are the
        likeliest few tokens; without siblings that draw is from a row of one token, and is like any
        other."""
        ask, cut = self.ask, self.ask.truncation
        earlier = bool(ask.earlier)
        likeliest = ask.sampling.greedy and (earlier or max(ask.counts) > 1)
        return cut.mass, cut.support, earlier, likeliest


def _decide(asking: Sequence[tuple[Job[Any], Decide]]) -> None:
    for (job, _), answer in zip(asking, decide([ask for _, ask in asking]), strict=True):
        job.resume(answer)


def _tell(asking: Sequence[tuple[Job[Any], ReadTokens]]) -> None:
    for (job, _), answer in zip(asking, tokens_of([ask for _, ask in asking]), strict=True):
        job.resume(answer)


def _tell_log_probs(asking: Sequence[tuple[Job[Any], ReadLogProbs]]) -> None:
    for (job, _), answer in zip(asking, log_probs_of([ask for _, ask in asking]), strict=True):
        job.resume(answer)


def _bring_drafts_home(asking: Sequence[tuple[Job[Any], ToHostTogether]]) -> None:
    """Answer all that wait for several drafts."""
    drafts = iter(drafts_of([host for _, ask in asking for host in ask.hosts]))
    for job, ask in asking:
        own = [next(drafts) for _ in ask.hosts]
        job.resume(not_finite("drafter") if None in own else own)


def _bring_home(asking: Sequence[tuple[Job[Any], ToHost]]) -> None:
    """Answer all that want results on the host."""
    decided: list[tuple[Job[Any], DeviceVerdict]] = []
    drawn: list[tuple[Job[Any], ToHost]] = []
    for job, ask in asking:
        if isinstance(ask.answers, DeviceVerdict):
            decided.append((job, ask.answers))
        else:
            drawn.append((job, ask))
    if drawn:
        for (job, _), draft in zip(drawn, drafts_of([ask for _, ask in drawn]), strict=True):
            job.resume(not_finite("drafter") if draft is None else draft)
    if decided:
        found = decisions_of([verdict for _, verdict in decided])
        for (job, _), decision in zip(decided, found, strict=True):
            job.resume(decision)


def _report(asking: Sequence[tuple[Job[Any], Report]]) -> None:
    for job, ask in asking:
        job.report(ask.result)


# Asks that need no pass, in this order: all that is decided goes to the host by one copy.
_ANSWERS: dict[type[Any], Callable[[Any], None]] = {
    Decide: _decide,
    ReadTokens: _tell,
    ToHost: _bring_home,
    ToHostTogether: _bring_drafts_home,
    ReadLogProbs: _tell_log_probs,
    Report: _report,
}
# Those of them that wait for the device.
_WAITING = {ReadTokens, ToHost, ToHostTogether, ReadLogProbs}
