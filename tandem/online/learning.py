"""Learning beside serving: texts go to the replay, a trainer learns, and its weights are served."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from tandem.errors import Unavailable, first_line
from tandem.online.kept_text import KeptText
from tandem.online.order import Order
from tandem.online.process import TrainerProcess
from tandem.online.replay import Replay
from tandem.online.state import StateFolder

_log = structlog.get_logger(__name__)

# Texts that wait to be written; older ones are dropped where the disk is slower than texts are.
_MOST_WAITING = 256
# Texts of a file, and how long a text waits for others.
_TEXTS, _SECONDS = 8, 5.0
# How often the thread looks what is due.
_TICK_SECONDS = 0.5
# Until a trainer that ended is started again; doubled each time.
_LEAST_PAUSE, _MOST_PAUSE = 1.0, 300.0

T = TypeVar("T")
# Makes passes with the weights of a version, from a file (None: the checkpoint's); what it returns
# gives them to new sequences.
Renew = Callable[[int, Path | None], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class LearningStatus:
    """How far learning is; see GetLearningResponse in learning.proto.

    Attributes:
        version: of the weights of new sequences.
        frozen: whether it is stopped.
        training: whether a trainer is at work.
        problem: in a sentence; empty for none.
        kept_texts: since the start.
        held_texts: on the disk, when texts were last written.
        steps: of the trainer.
        updates: how often new weights were taken, over restarts.
        turned_down: measurements without new weights, since the start.
        overlap: the newest, by "served", "trained", "home"; empty before the first one.
    """

    version: int = 0
    frozen: bool = False
    training: bool = False
    problem: str = ""
    kept_texts: int = 0
    held_texts: int = 0
    steps: int = 0
    updates: int = 0
    turned_down: int = 0
    overlap: Mapping[str, float] = field(default_factory=dict)


class Learning:
    """One thread that writes texts, minds the trainer, and takes its weights.

    Attributes:
        status: newest.
        replay: the texts.

    Args:
        folder: of the state, which is this object's from now on.
        order: for the trainer.
        renew: see `Renew`.
        start: makes a trainer; None a process of its own.
        clock: in seconds.
    """

    def __init__(
        self,
        folder: StateFolder,
        order: Order,
        renew: Renew,
        start: Callable[..., TrainerProcess] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._order, self._renew = folder, order, renew
        self._start, self._clock = start or TrainerProcess, clock
        self.replay = Replay(folder.path / "replay", order.most_bytes, order.most_seconds)
        learnt = folder.learnt
        self.status = LearningStatus(
            learnt.version, learnt.frozen, held_texts=self._held(), updates=learnt.updates
        )
        self._texts: deque[tuple[float, KeptText]] = deque(maxlen=_MOST_WAITING)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._trainer: TrainerProcess | None = None
        self._closed = False
        self._pause, self._start_at = _LEAST_PAUSE, clock()
        self._thread = threading.Thread(target=self._run, name="learning", daemon=True)

    def begin(self) -> None:
        """Start the thread, once new weights can be taken; not behind `close`."""
        if self._closed:
            return
        if not self._folder.saves:
            self._say_problem(
                f"{self._folder.path} cannot be written: nothing is kept, and nothing is learnt"
            )
        self._thread.start()

    def keep(self, text: KeptText) -> None:
        """Keep a text to learn from. Never waits; from any thread."""
        if self._folder.saves and not self.status.frozen:
            self._texts.append((self._clock(), text))

    def freeze(self, *, frozen: bool) -> None:
        """Stop learning, or let it go on. Waits; not on the event loop.

        Raises:
            Unavailable: the drafter is stopping.
            OSError: the state cannot be written.
        """
        self._call(lambda: self._freeze(frozen))

    def reset(self) -> int:
        """Forget what was learnt and kept; the version of the checkpoint's weights from now on.

        Raises:
            Unavailable: the drafter is stopping.
            OSError: the state cannot be written.
            StartupError, MemoryError: the passes cannot be made; all is as before.
        """
        return self._call(self._reset)

    def close(self) -> None:
        """End the trainer, and let another process have the folder. Waits."""
        self._closed = True
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()
        self._end_trainer()
        self._folder.close()

    def _call(self, work: Callable[[], T]) -> T:
        """Have the thread do something between what it does."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._calls.put(call)
        while True:
            with suppress(TimeoutError):
                return done.result(_TICK_SECONDS)
            if not self._thread.is_alive() and not done.done():
                raise Unavailable("the drafter is stopping")

    def _run(self) -> None:
        while True:
            with suppress(queue.Empty):
                call = self._calls.get(timeout=_TICK_SECONDS)
                if call is None:
                    self._write_texts()
                    return
                call()
            try:
                self._look()
            except Exception as error:  # serving goes on
                self._say_problem(f"{type(error).__name__}: {first_line(error)}")

    def _look(self) -> None:
        """Do what is due."""
        oldest = self._texts[0][0] if self._texts else self._clock()
        if len(self._texts) >= _TEXTS or self._clock() - oldest >= _SECONDS:
            self._write_texts()
        idle = self._trainer is None and self._folder.saves and not self.status.frozen
        if idle and self._clock() >= self._start_at:
            self._start_trainer()

    def _write_texts(self) -> None:
        while self._texts:
            count = min(len(self._texts), _TEXTS)
            texts = [self._texts.popleft()[1] for _ in range(count)]
            try:
                self.replay.add(texts)
            except OSError as error:
                self._say_problem(f"texts are not kept: {error}")
                return
            self._note(kept_texts=self.status.kept_texts + count, held_texts=self._held())

    def _held(self) -> int:
        return sum(file.texts for file in self.replay.files())

    def _start_trainer(self) -> None:
        order = replace(self._order, weights=self._folder.weights, seed=self.status.version)
        try:
            self._trainer = self._start(order, self._said, self._ended)
        except OSError as error:
            self._fail(f"the trainer cannot be started: {error}")
            return
        self._note(training=True, steps=0)

    def _end_trainer(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.end()
        self._note(training=False)

    def _said(self, trainer: TrainerProcess, said: dict[str, Any]) -> None:
        self._calls.put(lambda: self._hear(said) if trainer is self._trainer else None)

    def _ended(self, trainer: TrainerProcess, why: str) -> None:
        def note() -> None:
            if trainer is self._trainer:
                self._trainer = None
                self._fail(why)

        self._calls.put(note)

    def _fail(self, why: str) -> None:
        """No trainer is at work; the next one begins later."""
        self._start_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, _MOST_PAUSE)
        self._note(training=False)
        self._say_problem(why)

    def _hear(self, said: dict[str, Any]) -> None:
        if "problem" in said:
            self._say_problem(f"the trainer says: {said['problem']}")
        if "measured" not in said:
            return
        measured, fault = said["measured"], said["fault"]
        overlap = {name: measured[name] for name in ("served", "trained", "home")}
        self._pause = _LEAST_PAUSE
        self._note(overlap=overlap, steps=measured["steps"], problem="")
        if fault:
            self._note(turned_down=self.status.turned_down + 1)
        else:
            self._take(self._folder.path / "offers" / said["offer"], measured)

    def _take(self, offer: Path, measured: Mapping[str, float]) -> None:
        version = self.status.version + 1
        try:
            take = self._renew(version, offer)
            learnt = self._folder.take(offer)
        except Exception as error:  # the weights that are served go on; the trainer has others
            self._end_trainer()
            self._fail(f"new weights are not taken: {first_line(error)}")
            return
        take()
        self._note(version=learnt.version, updates=learnt.updates)
        _log.info("new weights", version=version, **{k: round(v, 4) for k, v in measured.items()})

    def _freeze(self, frozen: bool) -> None:
        self._folder.write(replace(self._folder.learnt, frozen=frozen))
        self._note(frozen=frozen)
        _log.info("learning is stopped" if frozen else "learning goes on")
        if frozen:
            self._texts.clear()
            self._end_trainer()

    def _reset(self) -> int:
        version = self.status.version + 1
        take = self._renew(version, None)
        self._end_trainer()
        self._texts.clear()
        self._folder.begin_again()
        take()
        self._note(version=version, held_texts=0, overlap={}, problem="")
        self._start_at, self._pause = self._clock(), _LEAST_PAUSE
        _log.info("what was learnt is forgotten", version=version)
        return version

    def _note(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def _say_problem(self, problem: str) -> None:
        if problem != self.status.problem:
            _log.warning("learning", problem=problem)
        self._note(problem=problem)
