"""tandem drafter: what a drafter that learns while it serves has learnt, for administrators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.failure import Failure, Misconfigured
from tandem.tools.cli.display.terminal import out
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.options import host_and_port

if TYPE_CHECKING:
    from tandem.drafter.v1 import learning_pb2 as pb

# Of an answer. A drafter that forgets what it learnt reads its checkpoint again.
_SECONDS = 30.0
_MIB = 1 << 20
# Texts after which one of eight is held out eight times, as the trainer needs.
_FIRST = 64

drafter = typer.Typer(
    name="drafter",
    help="See and steer what a drafter learns while it serves.",
    epilog=(
        "The drafter needs [bold]TANDEM_DRAFTER_ONLINE=20[/] (seconds of each minute),"
        " [bold]TANDEM_DRAFTER_ONLINE_FOLDER=DIR[/] and"
        " [bold]TANDEM_DRAFTER_ADMIN_LISTEN=HOST:PORT[/]."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_AdminAddress = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        metavar="HOST:PORT",
        help="The drafter's admin port, which is in plaintext.",
        callback=host_and_port,
    ),
]


@drafter.command()
def status(address: _AdminAddress) -> None:
    """Show what is learnt by now."""
    from tandem.drafter.v1 import learning_pb2 as pb

    with _administering(address) as stub:
        reply = stub.GetLearning(pb.GetLearningRequest(), timeout=_SECONDS)
    for line in _lines(reply):
        _print(line)


@drafter.command()
def reset(address: _AdminAddress) -> None:
    """Forget what was learnt, and all texts that were kept."""
    from tandem.drafter.v1 import learning_pb2 as pb

    with _administering(address) as stub:
        reply = stub.ResetLearning(pb.ResetLearningRequest(), timeout=_SECONDS)
    _print(
        f"new texts are drafted with the checkpoint's weights, version {reply.weights_version:,};"
        " open ones keep theirs"
    )


@drafter.command()
def freeze(address: _AdminAddress) -> None:
    """Stop learning: keep no text, and the weights as they are."""
    _set_frozen(address, True)
    _print("frozen: no text is kept, and the weights stay as they are, also over restarts")


@drafter.command()
def thaw(address: _AdminAddress) -> None:
    """Let a frozen drafter learn again."""
    _set_frozen(address, False)
    _print("thawed: texts are kept, and learning goes on")


def _set_frozen(address: str, frozen: bool) -> None:
    from tandem.drafter.v1 import learning_pb2 as pb

    with _administering(address) as stub:
        stub.FreezeLearning(pb.FreezeLearningRequest(frozen=frozen), timeout=_SECONDS)


def _lines(reply: pb.GetLearningResponse) -> Iterator[str]:
    """What a drafter says of its learning."""
    yield (
        f"weights: version {reply.weights_version:,}; {reply.updates:,} updates taken,"
        f" {reply.turned_down:,} turned down"
    )
    if reply.frozen:
        state = "frozen; `tandem drafter thaw` lets it go on"
    elif reply.training:
        state = f"at work, {reply.steps:,} steps since the trainer's start"
    else:
        state = "stopped"
    yield f"learning: {state}"
    if reply.problem:
        yield f"problem: {' '.join(reply.problem.split())}"
    yield (
        f"texts: {reply.kept_texts:,} kept since the start, {reply.held_texts:,} on the disk"
        f" ({reply.held_bytes / _MIB:,.1f} MiB)"
    )
    if not reply.HasField("overlap"):
        waits = "; the first step waits for about 64 texts" if reply.held_texts < _FIRST else ""
        yield f"overlap on held-out texts: not measured yet{waits}"
        return
    overlap = reply.overlap
    yield (
        f"overlap on held-out texts: {overlap.served:.3f} as served, {overlap.trained:.3f} as"
        f" trained; tokens of home texts are {overlap.forgotten:.3f} nats less likely than at first"
    )


def _print(line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)


@contextmanager
def _administering(address: str) -> Iterator[Any]:
    """The stub of a drafter's admin port; a call that fails is reported.

    Args:
        address: of the port.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from tandem.client.connection import CONNECT_SECONDS
    from tandem.drafter.v1 import learning_pb2_grpc
    from tandem.rpc.channel import connect_blocking

    with reported(), connect_blocking(address) as channel:
        # Tells a port where nobody listens from a drafter that is UNAVAILABLE.
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            check(health_pb2.HealthCheckRequest(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise Failure(
                    f"no admin port of a drafter answers at {address}: start the drafter with"
                    " TANDEM_DRAFTER_ADMIN_LISTEN=HOST:PORT, and name that address"
                ) from None
        try:
            yield learning_pb2_grpc.LearningServiceStub(channel)
        except grpc.RpcError as error:
            raise _failure(address, error) from None


def _failure(address: str, error: Any) -> Failure:
    """A failed call of the service, in a sentence that says what to do."""
    import grpc

    from tandem.client.errors import failure_of

    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return Failure(
            f"the drafter at {address} has not loaded its model yet: try again in a moment"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Misconfigured(
            f"no drafter that learns answers at {address}: start it with TANDEM_DRAFTER_ONLINE,"
            " and name the address of its TANDEM_DRAFTER_ADMIN_LISTEN"
        )
    return failure_of(error)
