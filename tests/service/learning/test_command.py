"""tandem drafter, against an admin port without a drafter behind it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from typer.testing import CliRunner

from tandem.drafter.v1 import learning_pb2 as pb
from tandem.drafter.v1 import learning_pb2_grpc
from tandem.tools.cli.main import app
from tests.support.processes.ports import free_port

COMMANDS = ("status", "reset", "freeze", "thaw")
LEARNING = pb.GetLearningResponse(
    weights_version=7,
    training=True,
    kept_texts=1234,
    held_texts=56,
    held_bytes=3 << 20,
    steps=4321,
    updates=6,
    turned_down=2,
    overlap=pb.GetLearningResponse.Overlap(served=0.5, trained=0.625, forgotten=0.125),
)


class FakeLearning(learning_pb2_grpc.LearningServiceServicer):
    """Answers what it is given.

    Attributes:
        learning: how far it is.
        fails_with: status of each call; None answers.
        frozen: what it was told last.
    """

    def __init__(self) -> None:
        self.learning = LEARNING
        self.fails_with: grpc.StatusCode | None = None
        self.frozen: bool | None = None

    def _answer(self, context: Any, reply: Any) -> Any:
        if self.fails_with is not None:
            context.abort(self.fails_with, "its own words")
        return reply

    def GetLearning(self, request: Any, context: Any) -> Any:
        return self._answer(context, self.learning)

    def ResetLearning(self, request: Any, context: Any) -> Any:
        return self._answer(context, pb.ResetLearningResponse(weights_version=8))

    def FreezeLearning(self, request: pb.FreezeLearningRequest, context: Any) -> Any:
        self.frozen = request.frozen
        return self._answer(context, pb.FreezeLearningResponse())


@contextmanager
def serving(fake: FakeLearning | None) -> Iterator[str]:
    """The address of an admin port; with None it is that of another service."""
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    if fake is not None:
        learning_pb2_grpc.add_LearningServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def fake() -> FakeLearning:
    return FakeLearning()


@pytest.fixture
def address(fake: FakeLearning) -> Iterator[str]:
    with serving(fake) as address:
        yield address


def run(*words: str) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    result = CliRunner().invoke(app, ["drafter", *words], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_status_says_how_far_it_is(address: str) -> None:
    code, shown, errors = run("status", "-a", address)
    assert (code, errors) == (0, "")
    assert shown.splitlines() == [
        "weights: version 7; 6 updates taken, 2 turned down",
        "learning: at work, 4,321 steps since the trainer's start",
        "texts: 1,234 kept since the start, 56 on the disk (3.0 MiB)",
        "overlap on held-out texts: 0.500 as served, 0.625 as trained; tokens of home texts are"
        " 0.125 nats less likely than at first",
    ]


def test_status_says_why_nothing_is_learnt(fake: FakeLearning, address: str) -> None:
    fake.learning = pb.GetLearningResponse(problem="the trainer [x]\nended with code 9")
    _, shown, _ = run("status", "-a", address)
    assert "learning: stopped\nproblem: the trainer [x] ended with code 9\n" in shown
    assert "overlap on held-out texts: not measured yet" in shown
    fake.learning = pb.GetLearningResponse(frozen=True)
    _, shown, _ = run("status", "-a", address)
    assert "learning: frozen; `tandem drafter thaw` lets it go on" in shown
    assert "problem" not in shown


def test_reset_says_what_drafts_from_now_on(address: str) -> None:
    code, shown, _ = run("reset", "-a", address)
    assert (code, shown.count("\n")) == (0, 1)
    assert "checkpoint's weights, version 8" in shown


@pytest.mark.parametrize(("command", "frozen"), [("freeze", True), ("thaw", False)])
def test_a_drafter_is_frozen_and_thawed(
    command: str, frozen: bool, fake: FakeLearning, address: str
) -> None:
    code, shown, _ = run(command, "-a", address)
    assert (code, fake.frozen) == (0, frozen)
    assert shown.startswith("frozen: no text is kept" if frozen else "thawed: texts are kept")


FAULTS = {
    grpc.StatusCode.UNAVAILABLE: (1, "has not loaded its model yet: try again in a moment"),
    grpc.StatusCode.UNIMPLEMENTED: (2, "start it with TANDEM_DRAFTER_ONLINE,"),
    grpc.StatusCode.INTERNAL: (1, "INTERNAL: its own words"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("status", FAULTS)
def test_a_call_that_fails_is_one_sentence(
    command: str, status: grpc.StatusCode, fake: FakeLearning, address: str
) -> None:
    fake.fails_with = status
    code, sentence = FAULTS[status]
    found, shown, errors = run(command, "-a", address)
    assert (found, shown, errors.count("\n")) == (code, "", 1)
    assert sentence in errors


@pytest.mark.parametrize("command", COMMANDS)
def test_a_port_of_another_service_is_none_of_a_drafter_that_learns(command: str) -> None:
    with serving(None) as address:
        code, _, errors = run(command, "-a", address)
    assert (code, errors.count("\n")) == (2, 1)
    assert f"no drafter that learns answers at {address}: start it with" in errors


@pytest.mark.parametrize("command", COMMANDS)
def test_where_nobody_listens_it_says_which_setting_opens_the_port(command: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    code, _, errors = run(command, "-a", address)
    assert (code, errors.count("\n")) == (1, 1)
    assert f"answers at {address}: start the drafter with TANDEM_DRAFTER_ADMIN_LISTEN" in errors


def test_an_address_has_to_be_given_with_its_port() -> None:
    code, _, errors = run("status")
    assert (code, "--address" in errors) == (2, True)
    code, _, errors = run("status", "-a", "here")
    assert (code, "'here' is not HOST:PORT" in errors) == (2, True)
