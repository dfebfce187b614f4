"""The load generator over OpenAI's HTTP API: /v1/completions, streamed."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import h11

from tandem.failure import Failure
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.endpoint import Endpoint, endpoint_at
from tandem.tools.load.generator import LoadGenerator, cut
from tandem.tools.load.timeline import Timeline

_CHUNK = 65_536
_CONNECT_SECONDS = 5.0


class HttpLoadGenerator(LoadGenerator):
    """Requests the same texts by HTTP, each over a connection of its own.

    A summary has what the usage tells: tokens, rounds and acceptance; where the time went is not
    in it.

    Args:
        where: endpoint or address of the HTTP front.
        timeout_s: how long a text may take.
    """

    def __init__(self, where: Endpoint | str, timeout_s: float = 600.0) -> None:
        super().__init__(where, timeout_s)
        place = endpoint_at(where)
        self._host, _, port = place.address.rpartition(":")
        self._port = int(port)
        self._tls: ssl.SSLContext | None = None
        if place.tls is not None:
            self._tls = ssl.create_default_context(cafile=str(place.tls.authorities.path))
            if place.tls.certificate is not None and place.tls.key is not None:
                self._tls.load_cert_chain(place.tls.certificate.path, place.tls.key.path)
        self._name = place.name or self._host

    async def __aenter__(self) -> Self:
        """Raises Failure: nothing serves texts there."""
        status = 0
        try:
            async with asyncio.timeout(_CONNECT_SECONDS), self._reply("GET", "/health") as found:
                status, _ = found
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            raise Failure(
                f"no HTTP front answers at {self._place.address}: `tandem up` prints its address"
            ) from error
        if status != 200:
            raise Failure(f"{self._place.address} is not ready: /health answers {status}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Each text has ended its own connection."""

    async def text(
        self,
        generation: pb.Generation,
        intended_s: float | None = None,
        timeout_s: float | None = None,
        seen: Callable[[pb.GenerateResponse], object] = lambda event: None,
    ) -> Timeline:
        """See `LoadGenerator`; `seen` is called with nothing."""
        arrivals: list[tuple[float, int]] = []
        summary, error = pb.Summary(), ""
        asked = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s),
                self._reply("POST", "/v1/completions", body_of(generation)) as (status, parts),
            ):
                if status != 200:
                    told = b"".join([part async for part in parts]).decode(errors="replace")
                    error = f"{status}: {told}"
                else:
                    async with aclosing(_events(parts)) as events:
                        async for event in events:
                            error = error or _take(event, arrivals, summary)
        except (OSError, TimeoutError, h11.ProtocolError) as failed:
            error = f"{type(failed).__name__}: {failed}"
        due = asked if intended_s is None else intended_s
        ended = time.perf_counter()
        done = None if error else summary
        return Timeline(due, asked, tuple(arrivals), ended, cut(error), done)

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """A call's status, and the parts of its body as they come."""
        named = self._name if self._tls else None
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, server_hostname=named
        )
        try:
            connection = h11.Connection(h11.CLIENT)
            headers = [
                ("host", self._place.address),
                ("content-length", str(len(body))),
                ("connection", "close"),
                *self._place.metadata,
            ]
            request = h11.Request(method=method, target=path, headers=headers)
            writer.write(connection.send(request) or b"")
            writer.write(connection.send(h11.Data(data=body)) or b"" if body else b"")
            writer.write(connection.send(h11.EndOfMessage()) or b"")
            while not isinstance(event := await _next(connection, reader), h11.Response):
                pass
            yield event.status_code, _data(connection, reader)
        finally:
            writer.transport.abort()


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_CHUNK))
    return event


async def _data(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while isinstance(event := await _next(connection, reader), h11.Data):
        yield bytes(event.data)


async def _events(parts: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Server-sent events, but for the last."""
    held = b""
    async for part in parts:
        *whole, held = (held + part).split(b"\n\n")
        for each in whole:
            data = each.removeprefix(b"data: ")
            if data != b"[DONE]":
                yield json.loads(data)


def _take(event: Any, arrivals: list[tuple[float, int]], summary: pb.Summary) -> str:
    """Book an event; an error's sentence if it is one."""
    if "error" in event:
        return str(event["error"]["message"])
    for choice in event["choices"]:
        own = choice.get("tandem") or {}
        if "round" in own:
            arrivals.append((time.perf_counter(), len(own["tokens"])))
            summary.gammas.append(own["gamma"])
    if usage := event.get("usage"):
        drafts = [count for (_, count), g in zip(arrivals, summary.gammas, strict=True) if g]
        summary.new_tokens = usage["completion_tokens"]
        summary.prompt_tokens = usage["prompt_tokens"]
        summary.rounds = usage["tandem"]["rounds"]
        summary.drafted_tokens = usage["tandem"]["drafted_tokens"]
        summary.accepted_tokens = usage["tandem"]["accepted_tokens"]
        summary.acceptance_rate = usage["tandem"]["acceptance_rate"]
        summary.block_efficiency = sum(drafts) / len(drafts) if drafts else 0.0
    return ""


def body_of(generation: pb.Generation) -> bytes:
    """A request of a load as a body of /v1/completions.

    Raises:
        Failure: HTTP has no field for a part of it.
    """
    sampling, stopping = generation.sampling, generation.stopping
    speculation = generation.speculation
    if generation.HasField("chat") or generation.first_round:
        raise Failure("a chat, or a text that is resumed, is not requested by HTTP here")
    own: dict[str, Any] = {"tokens": True}
    own |= _set(speculation, "verifier", "gamma", "max_nodes")
    body = {
        "prompt": generation.prompt or list(generation.prompt_token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": stopping.max_new_tokens if stopping.HasField("max_new_tokens") else 256,
        "ignore_eos": stopping.ignore_eos,
        "tandem": own,
        **_set(sampling, "temperature", "top_k", "top_p", "min_p", "seed"),
    }
    if stopping.stop_strings:
        body["stop"] = list(stopping.stop_strings)
    if stopping.stop_token_ids:
        body["stop_token_ids"] = list(stopping.stop_token_ids)
    return json.dumps(body).encode()


def _set(message: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}
