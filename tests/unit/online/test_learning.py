"""What a drafter does beside serving: it writes texts, minds the trainer, takes its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import Unavailable, Unsupported
from tandem.online.learning import Learning
from tandem.online.order import Order
from tandem.online.state import StateFolder
from tests.support.waiting import wait_until
from tests.unit.online.test_kept_text import row, told

MEASURED = {"served": 0.6, "trained": 0.65, "error": 0.01, "unsaid": -0.2, "home": 0.01}


class FakeTrainer:
    """A trainer's process that says what a test has it say."""

    def __init__(self, order: Order, said: Callable[..., None], ended: Callable[..., None]) -> None:
        self.order, self._said, self._ended = order, said, ended
        self.killed = False

    def offer(self, content: bytes = b"weights") -> None:
        path = Path(self.order.folder) / "offers" / "offer-0001.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self.say({"measured": {**MEASURED, "steps": 25}, "fault": "", "offer": path.name})

    def say(self, said: dict[str, Any]) -> None:
        self._said(self, said)

    def die(self) -> None:
        self._ended(self, "the trainer ended with -9")

    def end(self) -> None:
        self.killed = True
        self._ended(self, "the trainer ended with -9")


class Drafter:
    """What learns, with its trainers, its clock and the weights that it serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.served: list[tuple[int, bytes]] = []
        self.trainers: list[FakeTrainer] = []
        self.fault: Exception | None = None
        self.learning = self.open()

    def open(self) -> Learning:
        order = Order(
            model="m", folder=str(self.folder), seconds=1, most_bytes=1 << 20, most_seconds=60
        )
        return Learning(StateFolder(self.folder), order, self.renew, self.start, lambda: self.now)

    def start(self, *args: Any) -> Any:
        if self.fault is not None and isinstance(self.fault, OSError):
            raise self.fault
        self.trainers.append(FakeTrainer(*args))
        return self.trainers[-1]

    def renew(self, version: int, weights: Path | None) -> Callable[[], None]:
        if self.fault is not None:
            raise self.fault
        content = b"" if weights is None else weights.read_bytes()
        return lambda: self.served.append((version, content))

    def keep(self, number: int) -> None:
        """A text that begins and ends."""
        text = self.learning.listen([number] * 3)
        if text is not None:
            text.hear([1], told(1, row(1)), 1)
            self.learning.keep(text)

    def look(self) -> None:
        """Wait until the thread has done what is due."""
        for _ in range(2):
            self.learning._call(lambda: None)

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    def has_trainers(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.trainers) == count and self.learning.status.training


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafter]:
    monkeypatch.setattr("tandem.online.learning._TICK_SECONDS", 0.005)
    found = Drafter(tmp_path / "state")
    found.learning.begin()
    wait_until(found.has_trainers(1))
    yield found
    found.learning.close()


def test_texts_are_written_together(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whether they are held out."""
    monkeypatch.setattr(drafter.learning._holdout, "takes", lambda ids: bool(ids[0] % 3 == 0))
    for number in range(8):
        drafter.keep(number)
    wait_until(lambda: drafter.learning.status.kept_texts == 8)
    assert [file.texts for file in drafter.learning.replay.files()] == [8]
    (file,) = drafter.learning.replay.files()
    held_out = {
        int(text.token_ids[0]): text.held_out for text in drafter.learning.replay.read(file)
    }
    assert held_out == {number: number % 3 == 0 for number in range(8)}
    drafter.keep(8)
    drafter.now += 5  # nothing else comes
    wait_until(lambda: drafter.learning.status.held_texts == 9)


def test_a_text_that_waits_is_written_at_the_end(drafter: Drafter) -> None:
    drafter.keep(1)
    drafter.learning.close()
    assert [file.texts for file in drafter.learning.replay.files()] == [1]


def test_weights_that_are_offered_are_served(drafter: Drafter) -> None:
    drafter.trainer.offer(b"better")
    wait_until(lambda: drafter.learning.status.version == 1)
    assert drafter.served == [(1, b"better")]
    status = drafter.learning.status
    assert (status.updates, status.turned_down, status.steps) == (1, 0, 25)
    assert status.overlap == {"served": 0.6, "trained": 0.65}
    assert status.forgotten == 0.01
    drafter.learning.close()
    again = drafter.open()
    assert (again.status.version, again.status.updates) == (1, 1)
    again.close()


def test_weights_that_are_turned_down_are_not(drafter: Drafter) -> None:
    drafter.trainer.say({"measured": {**MEASURED, "steps": 25}, "fault": "nothing gained"})
    wait_until(lambda: drafter.learning.status.turned_down == 1)
    assert drafter.served == []


@pytest.mark.parametrize("fault", [MemoryError("no room"), ValueError("broken")])
def test_weights_that_cannot_be_taken_leave_those_that_serve(
    drafter: Drafter, fault: Exception
) -> None:
    """The trainer holds them for served, so another one begins with what is: later and later, also
    where it measures before."""
    for count, pause in enumerate((1, 2, 4), 1):
        drafter.fault = fault
        drafter.trainer.say({"measured": {**MEASURED, "steps": 25}, "fault": "nothing gained"})
        drafter.trainer.offer()
        wait_until(lambda: not drafter.learning.status.training)
        drafter.look()
        assert "not taken" in drafter.learning.status.problem
        assert drafter.trainer.killed
        assert not any((drafter.folder / "offers").iterdir())
        drafter.fault = None
        drafter.now += pause - 0.01
        drafter.look()
        assert len(drafter.trainers) == count
        drafter.now += 0.02
        wait_until(drafter.has_trainers(count + 1))
    drafter.trainer.offer(b"next")
    wait_until(lambda: drafter.learning.status.version == 1)
    assert drafter.served == [(1, b"next")]
    drafter.fault = fault
    drafter.trainer.offer()
    wait_until(lambda: not drafter.learning.status.training)
    drafter.now += 1.01  # some were taken meanwhile
    wait_until(drafter.has_trainers(5))


def test_a_trainer_that_dies_is_started_again_later_and_later(drafter: Drafter) -> None:
    for count, pause in enumerate((1, 2, 4, 8), 1):
        drafter.trainer.die()
        wait_until(lambda: "ended with -9" in drafter.learning.status.problem)
        wait_until(lambda: not drafter.learning.status.training)
        drafter.now += pause - 0.01
        drafter.look()
        assert len(drafter.trainers) == count
        drafter.now += 0.02
        wait_until(drafter.has_trainers(count + 1))
    drafter.trainer.say({"measured": {**MEASURED, "steps": 25}, "fault": "nothing gained"})
    wait_until(lambda: drafter.learning.status.problem == "")
    drafter.trainer.die()
    wait_until(lambda: not drafter.learning.status.training)
    drafter.now += 1.01  # it had worked
    wait_until(drafter.has_trainers(6))


def test_a_system_that_starts_no_process_is_said(tmp_path: Path) -> None:
    found = Drafter(tmp_path / "state")
    found.fault = OSError(11, "Resource temporarily unavailable")
    found.learning.begin()
    wait_until(lambda: "cannot be started" in found.learning.status.problem)
    found.learning.close()


def test_what_is_frozen_keeps_nothing_and_trains_nothing(drafter: Drafter) -> None:
    drafter.keep(0)  # not written yet
    drafter.learning.freeze(frozen=True)
    assert drafter.trainer.killed
    drafter.keep(1)
    drafter.now += 100
    drafter.learning.freeze(frozen=True)
    assert (drafter.learning.status.frozen, drafter.learning.status.training) == (True, False)
    drafter.learning.close()
    assert drafter.learning.replay.files() == []
    drafter.learning = drafter.open()  # also after a restart
    drafter.learning.begin()
    drafter.look()
    assert len(drafter.trainers) == 1
    drafter.learning.freeze(frozen=False)
    wait_until(drafter.has_trainers(2))


@pytest.mark.parametrize("change", ["freeze", "reset"])
def test_a_text_that_began_before_is_not_kept(drafter: Drafter, change: str) -> None:
    text = drafter.learning.listen([1, 2, 3])
    assert text is not None
    text.hear([1], told(1, row(1)), 1)
    if change == "reset":
        drafter.learning.reset()
    else:
        drafter.learning.freeze(frozen=True)
        drafter.learning.freeze(frozen=False)
    drafter.learning.keep(text)
    drafter.keep(2)
    drafter.now += 5
    wait_until(lambda: drafter.learning.status.kept_texts == 1)
    (kept,) = drafter.learning.replay.read(drafter.learning.replay.files()[0])
    assert kept.token_ids[0] == 2


def test_texts_grow_too_old_also_where_nothing_comes(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        drafter.keep(number)
    wait_until(lambda: drafter.learning.status.held_texts == 8)
    drafter.learning.freeze(frozen=True)
    monkeypatch.setattr(drafter.learning.replay, "_clock", lambda: time.time() + 61)
    drafter.now += 61
    wait_until(lambda: drafter.learning.status.held_texts == 0)


def test_what_goes_wrong_in_the_thread_is_said_and_no_end(drafter: Drafter) -> None:
    drafter.trainer.say({"measured": {}, "fault": ""})
    wait_until(lambda: "KeyError" in drafter.learning.status.problem)
    drafter.now += 1.01
    wait_until(drafter.has_trainers(2))
    drafter.trainer.say({"ready": True})
    wait_until(lambda: drafter.learning.status.problem == "")


def test_before_passes_are_chosen_nothing_is_renewed(tmp_path: Path) -> None:
    found = Drafter(tmp_path / "state")
    found.keep(1)
    found.look()
    assert found.trainers == []
    assert found.learning.reset() == 0
    found.learning.freeze(frozen=True)
    found.learning.freeze(frozen=False)
    found.learning.begin()
    wait_until(found.has_trainers(1))
    found.learning.close()


def test_a_reset_forgets_all(drafter: Drafter) -> None:
    drafter.trainer.offer(b"better")
    wait_until(lambda: drafter.learning.status.version == 1)
    for number in range(8):
        drafter.keep(number)
    wait_until(lambda: drafter.learning.status.held_texts == 8)
    assert drafter.learning.reset() == 2
    assert drafter.served == [(1, b"better"), (2, b"")]
    assert drafter.learning.replay.files() == []
    assert drafter.learning.status.held_texts == 0
    wait_until(drafter.has_trainers(2))
    assert drafter.trainer.order.weights == ""
    # What the trainer before it had still to say is of no use.
    drafter.trainers[0].offer(b"late")
    drafter.learning.freeze(frozen=False)
    assert drafter.learning.status.version == 2


@pytest.mark.parametrize("chosen", [True, False])
def test_a_reset_without_room_for_weights_forgets_the_texts(drafter: Drafter, chosen: bool) -> None:
    """Nor does it wait for the choice of what computes passes."""
    drafter.trainer.offer(b"better")
    wait_until(lambda: drafter.learning.status.version == 1)
    for number in range(8):
        drafter.keep(number)
    wait_until(lambda: drafter.learning.status.held_texts == 8)
    drafter.fault, drafter.learning._renews = MemoryError("no room"), chosen
    sentence = "the texts are forgotten, .* is not: no room" if chosen else "still chooses"
    with pytest.raises(MemoryError if chosen else Unavailable, match=sentence):
        drafter.learning.reset()
    assert drafter.learning.replay.files() == []
    status = drafter.learning.status
    assert (status.version, status.held_texts, status.overlap) == (1, 0, {})
    assert drafter.trainers[0].killed
    drafter.learning.begin()
    wait_until(drafter.has_trainers(2))
    assert drafter.trainer.order.weights.endswith("00000001.safetensors")


def test_where_nothing_was_learnt_a_reset_makes_no_passes(drafter: Drafter) -> None:
    drafter.fault = MemoryError("no room")
    for number in range(8):
        drafter.keep(number)
    wait_until(lambda: drafter.learning.status.held_texts == 8)
    assert drafter.learning.reset() == 0
    assert drafter.learning.status.held_texts == 0
    assert drafter.learning.replay.files() == []
    wait_until(drafter.has_trainers(2))


def test_a_full_disk_is_said_and_serving_goes_on(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tandem.online.replay.save_file", full)
        for number in range(8):
            drafter.keep(number)
        wait_until(lambda: "No space left" in drafter.learning.status.problem)
    for number in range(8):
        drafter.keep(number)
    wait_until(lambda: drafter.learning.status.kept_texts == 8)


def test_texts_that_come_faster_than_they_are_written_are_dropped(drafter: Drafter) -> None:
    def burst() -> None:  # in the thread itself, which writes nothing meanwhile
        for number in range(1000):
            drafter.keep(number)

    drafter.learning._call(burst)
    wait_until(lambda: drafter.learning.status.kept_texts == 64)
    first = drafter.learning.replay.read(drafter.learning.replay.files()[0])[0]
    assert first.token_ids[0] == 1000 - 64


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.online.state._writable", lambda path: False)
    found = Drafter(tmp_path / "state")
    found.learning.begin()
    assert "cannot be written" in found.learning.status.problem
    found.keep(1)
    found.learning.freeze(frozen=False)
    with pytest.raises(Unsupported, match="nothing to forget"):
        found.learning.reset()
    found.learning.close()
    assert found.trainers == []
    assert not (tmp_path / "state" / "replay").exists()


def test_a_drafter_that_stops_takes_no_orders(drafter: Drafter) -> None:
    drafter.learning.close()
    with pytest.raises(Unavailable):
        drafter.learning.reset()
    assert drafter.trainer.killed
