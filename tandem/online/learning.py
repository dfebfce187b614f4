"""Learning beside serving: texts go to the replay, a trainer learns, and its weights are served."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from tandem.errors import StartupError, Unavailable, Unsupported, first_line
from tandem.online.holdout import Holdout
from tandem.online.kept_text import NO_STATES, HeardText, KeptStates, KeptText
from tandem.online.order import Order
from tandem.online.process import TrainerProcess
from tandem.online.replay import Replay
from tandem.online.state import StateFolder

_log = structlog.get_logger(__name__)

# Texts that wait to be written; older ones are dropped where the disk is slower than texts are.
_MOST_WAITING = 64
# Texts of a file, and how long a text waits for others.
_TEXTS, _SECONDS = 8, 5.0
# How often the thread looks what is due.
_TICK_SECONDS = 0.5
# Until a trainer that ended is started again; doubled each time.
_LEAST_PAUSE, _MOST_PAUSE = 1.0, 300.0

# Between two looks for texts that are too old; and how long the thread may take to end.
_PRUNE_SECONDS, _STOP_SECONDS = 60.0, 20.0

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
        overlap: the newest, by "served" and "trained"; empty before the first one.
        forgotten: by how many nats home texts are less likely than they were at first; the newest.
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
    forgotten: float = 0.0


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
        keeps: of hidden states.
    """

    def __init__(
        self,
        folder: StateFolder,
        order: Order,
        renew: Renew,
        start: Callable[..., TrainerProcess] | None = None,
        clock: Callable[[], float] = time.monotonic,
        keeps: KeptStates = NO_STATES,
    ) -> None:
        self._folder, self._order, self._renew, self._keeps = folder, order, renew, keeps
        self._start, self._clock = start or TrainerProcess, clock
        self.replay = Replay(folder.path / "replay", order.most_bytes, order.most_seconds)
        learnt = folder.learnt
        self.status = LearningStatus(
            learnt.version, learnt.frozen, held_texts=self._held(), updates=learnt.updates
        )
        self._problems = dict.fromkeys(("folder", "texts", "trainer", "weights"), "")
        # Texts that began in an earlier one, before learning was frozen or reset, are not kept.
        self._epoch = 0
        self._holdout = Holdout()
        self._texts: deque[tuple[float, HeardText]] = deque(maxlen=_MOST_WAITING)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._trainer: TrainerProcess | None = None
        self._pauses = dict.fromkeys(("trainer", "weights"), _LEAST_PAUSE)
        self._start_at = self._prune_at = clock()
        self._renews = False
        if not folder.saves:
            self._say_problem(
                "folder",
                f"{folder.path} cannot be written: nothing is kept, and nothing is learnt",
            )
        self._thread = threading.Thread(target=self._run, name="learning", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """From now on weights can be renewed, and a trainer is of use."""
        self._renews = True

    def listen(self, token_ids: Sequence[int]) -> HeardText | None:
        """What will be heard of a text that opens; None where it is not kept.

        Args:
            token_ids: that it opens with.
        """
        if not self._folder.saves or self.status.frozen:
            return None
        return HeardText(list(token_ids), self._epoch, self._keeps)

    def keep(self, text: HeardText) -> None:
        """Keep a text to learn from. Never waits; from any thread."""
        self._texts.append((self._clock(), text))

    def freeze(self, *, frozen: bool) -> None:
        """Stop learning, or let it go on. Waits; not on the event loop.

        Raises:
            Unavailable: the drafter is stopping.
            OSError: the state cannot be written.
        """
        self._call(lambda: self._freeze(frozen))

    def reset(self) -> int:
        """Forget what was kept, and then what was learnt; the version of the checkpoint's weights
        from now on.

        Raises:
            Unavailable: the drafter is stopping, or still chooses what computes its passes.
            Unsupported: the folder cannot be written.
            OSError: texts or state cannot be removed.
            MemoryError: the passes cannot be made: what was learnt stays, and no text.
        """
        return self._call(self._reset)

    def close(self) -> None:
        """End the trainer, and let another process have the folder. Waits."""
        self._calls.put(None)
        self._thread.join(_STOP_SECONDS)
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
        while not wait([done], _TICK_SECONDS).done:
            if not self._thread.is_alive() and not done.done():
                raise Unavailable("the drafter is stopping")
        return done.result()

    def _run(self) -> None:
        while True:
            try:
                with suppress(queue.Empty):
                    call = self._calls.get(timeout=_TICK_SECONDS)
                    if call is None:
                        self._write_texts()
                        return
                    call()
                self._look()
            except Exception as error:  # serving goes on, and so does this
                self._fail(f"{type(error).__name__}: {first_line(error)}")

    def _look(self) -> None:
        """Do what is due."""
        now = self._clock()
        if now >= self._prune_at and self._folder.saves:
            self._prune_at = now + _PRUNE_SECONDS
            self._prune()
        oldest = self._texts[0][0] if self._texts else now
        if len(self._texts) >= _TEXTS or now - oldest >= _SECONDS:
            self._write_texts()
        wanted = self._renews and self._folder.saves and not self.status.frozen
        if wanted and self._trainer is None and now >= self._start_at:
            self._start_trainer()

    def _write_texts(self) -> None:
        while self._texts:
            heard = [self._texts.popleft()[1] for _ in range(min(len(self._texts), _TEXTS))]
            texts = [text for each in heard if (text := self._kept(each)) is not None]
            if not texts:
                continue
            try:
                self.replay.add(texts)
            except OSError as error:
                self._say_problem("texts", f"texts are not kept: {error}")
                return
            self._say_problem("texts", "")
            self._note(kept_texts=self.status.kept_texts + len(texts), held_texts=self._held())
            self._prune()

    def _kept(self, heard: HeardText) -> KeptText | None:
        current = heard.epoch == self._epoch and not self.status.frozen
        kept = heard.kept if current else None
        return kept and replace(kept, held_out=self._holdout.takes(kept.token_ids))

    def _prune(self) -> None:
        try:
            self.replay.prune()
        except OSError as error:
            self._say_problem("texts", f"old texts are not removed: {error}")
        self._note(held_texts=self._held())

    def _held(self) -> int:
        return sum(file.texts for file in self.replay.files())

    def _start_trainer(self) -> None:
        order = replace(self._order, weights=self._folder.weights, seed=self.status.version)
        try:
            self._trainer = self._start(order, self._said, self._ended)
        except Exception as error:
            self._fail(f"the trainer cannot be started: {first_line(error)}")
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
                self._fail(why)

        self._calls.put(note)

    def _fail(self, why: str) -> None:
        """No trainer is at work."""
        self._begin_later("trainer", why)

    def _begin_later(self, about: str, why: str) -> None:
        """Another trainer begins after a pause, of twice the length each time."""
        self._end_trainer()
        self._start_at = self._clock() + self._pauses[about]
        self._pauses[about] = min(2 * self._pauses[about], _MOST_PAUSE)
        self._say_problem(about, why)

    def _hear(self, said: dict[str, Any]) -> None:
        if "problem" in said:
            self._say_problem("trainer", f"the trainer says: {said['problem']}")
        if "ready" in said:
            self._say_problem("trainer", "")
        if "measured" not in said:
            return
        measured, fault = said["measured"], said["fault"]
        overlap = {name: measured[name] for name in ("served", "trained")}
        self._pauses["trainer"] = _LEAST_PAUSE
        self._say_problem("trainer", "")
        self._note(overlap=overlap, steps=measured["steps"], forgotten=measured["home"])
        if fault:
            self._note(turned_down=self.status.turned_down + 1)
        else:
            self._take(self._folder.path / "offers" / said["offer"], measured)

    def _take(self, offer: Path, measured: Mapping[str, float]) -> None:
        try:
            take = self._renew(self.status.version + 1, offer)
            learnt = self._folder.take(offer)
        except Exception as error:  # the weights that are served go on
            # The trainer holds them for served: another one begins with the weights that are.
            self._begin_later("weights", f"new weights are not taken: {first_line(error)}")
            with suppress(OSError):
                offer.unlink(missing_ok=True)
            return
        take()
        self._pauses["weights"] = _LEAST_PAUSE
        self._say_problem("weights", "")
        self._note(version=learnt.version, updates=learnt.updates)
        figures = {name: round(value, 4) for name, value in measured.items()}
        _log.info("new weights", version=learnt.version, **figures)

    def _freeze(self, frozen: bool) -> None:
        self._folder.write(replace(self._folder.learnt, frozen=frozen))
        if frozen:
            self._epoch += 1
            self._end_trainer()
        self._note(frozen=frozen)
        _log.info("learning is stopped" if frozen else "learning goes on")

    def _reset(self) -> int:
        if not self._folder.saves:
            raise Unsupported(f"{self._folder.path} cannot be written: there is nothing to forget")
        self._end_trainer()
        self._epoch += 1
        self._folder.forget_texts()
        self._note(held_texts=0, overlap={}, forgotten=0.0)
        if self._folder.learnt.weights:
            if not self._renews:
                raise Unavailable("the drafter still chooses what computes its passes; try again")
            try:
                take = self._renew(self.status.version + 1, None)
            except (MemoryError, StartupError) as error:
                why = f"the texts are forgotten, what was learnt from them is not: {error}"
                raise MemoryError(why) from error
            learnt = self._folder.begin_again()
            take()
            self._note(version=learnt.version)
        for name in ("texts", "trainer", "weights"):
            self._say_problem(name, "")
        self._start_at, self._pauses = self._clock(), dict.fromkeys(self._pauses, _LEAST_PAUSE)
        _log.info("what was learnt is forgotten", version=self.status.version)
        return self.status.version

    def _note(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def _say_problem(self, about: str, problem: str) -> None:
        if problem and problem != self._problems[about]:
            _log.warning("learning", problem=problem)
        self._problems[about] = problem
        self._note(problem="; ".join(filter(None, self._problems.values())))
