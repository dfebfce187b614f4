"""A service as a process: from its environment to its exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import structlog
import uvloop

from tandem.errors import StartupError
from tandem.rpc.security.settings import tls_of
from tandem.rpc.server import RunningServer, Service
from tandem.settings import ServiceSettings, read_settings
from tandem.telemetry import logs
from tandem.telemetry.tracing import switch as tracing

_log = structlog.get_logger(__name__)

S = TypeVar("S", bound=ServiceSettings)
T = TypeVar("T")


def run(
    name: str,
    kind: type[S],
    find: Callable[[], Callable[[S], Service]],
    instead: Callable[[S], bool] = lambda _: False,
) -> NoReturn:
    """Run a service as a process, from its environment to its exit code.

    0 after SIGTERM or SIGINT, in a hurry too; 2 and one line where it cannot start as configured.

    Args:
        name: of the service, for people.
        kind: of its settings.
        find: gives what makes the service. Called when the settings are known to be good, for
            it may import what takes seconds.
        instead: does what this process is for in place of serving, and tells whether it did.
    """
    try:
        settings = read_settings(kind)
        logs.configure(name, settings.log_level, settings.log_format)
        writer = tracing.configure(name, settings.trace_file)
        try:
            if not instead(settings):
                uvloop.run(serve(settings, _imported(find)))
        finally:
            if writer is not None:
                writer.close()
    except StartupError as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        _exit(2)
    _exit(0)


def _imported(find: Callable[[], T]) -> T:
    """What `find` gives. Modules stay, so that nothing of them is looked through for garbage:
    that took half a second of each start."""
    gc.disable()
    try:
        return find()
    finally:
        gc.freeze()
        gc.enable()


def _keep_what_is_there() -> None:
    """Have garbage be looked for among new objects alone.

    Hundreds of thousands are there for good when a model is loaded. To walk through them would
    stop all texts for a tenth of a second and more, in the middle of a round.
    """
    gc.collect()
    gc.freeze()


def _exit(code: int) -> NoReturn:
    """End the process here and now.

    A thread may still be loading or compiling a model: native code that meets the end of the
    interpreter aborts the process, which would look like a crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def serve(settings: S, make_service: Callable[[S], Service]) -> None:
    """Run a service until SIGTERM or SIGINT, then drain it; a second one ends the drain.

    Args:
        settings: where to listen (port 0 takes a free one and logs it), and how long running
            requests may take to finish.
        make_service: called on the running loop, to which channels are bound for life.

    Raises:
        StartupError: a port is taken, a file of TLS is unfit, or the service cannot become ready.
    """
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            signal_number, lambda: (hurrying if stopping.is_set() else stopping).set()
        )
    tls = tls_of(settings)
    server = RunningServer(settings.listen, make_service(settings), tls, settings.admin_listen)
    await server.start()
    where = {} if server.admin_port is None else {"admin_port": server.admin_port}
    _log.info("listening", address=settings.listen, port=server.port, tls=tls is not None, **where)
    stop = asyncio.create_task(stopping.wait())
    ready = asyncio.create_task(server.ready())
    try:
        await _first_of(stop, ready)
        _keep_what_is_there()
        await stop
        _log.info("draining", grace_seconds=settings.drain_seconds)
    finally:
        stop.cancel()
        ready.cancel()
        await _drain(server, settings.drain_seconds, hurrying)
    _log.info("stopped")


async def _drain(server: RunningServer, grace_seconds: float, hurrying: asyncio.Event) -> None:
    """Stop a server, at once from the moment that somebody is in a hurry."""
    drain = asyncio.create_task(server.stop(grace_seconds))
    hurry = asyncio.create_task(hurrying.wait())
    await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        _log.info("ending the drain")
        await server.end_grace()
    hurry.cancel()
    await drain


async def _first_of(stop: asyncio.Task[bool], ready: asyncio.Task[None]) -> None:
    """Wait for either; a failure to become ready is raised."""
    tasks: Sequence[asyncio.Task[bool] | asyncio.Task[None]] = (stop, ready)
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if ready in done:
        ready.result()
