"""One HTTP call: its body, its reply, and how it fails."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import structlog
from starlette.requests import ClientDisconnect, Request

from orchestrator.front.http import errors, replies
from orchestrator.front.http.access import Access
from orchestrator.front.http.answer import ClientGone
from orchestrator.front.http.bodies import reading
from orchestrator.front.http.bodies.fields import Body
from orchestrator.front.http.replies import Json
from tandem.errors import IdleTimeout, TandemError
from tandem.rpc import messages
from tandem.rpc.status import notes_of

_log = structlog.get_logger(__name__)

_ID = "x-request-id"
# Bytes of a body that is read beside the event loop.
_LARGE = 64 << 10
B = TypeVar("B", bound=Body)


class HttpCall:
    """A call that is being handled.

    Attributes:
        caller: its name, for fair shares; empty if it has none.
        request_id: of it.
        replied: whether a reply has begun.
        receive: of ASGI.
        send: of ASGI.
    """

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._request = Request(scope, receive)
        self.replied = False
        self.caller = ""
        self.request_id = uuid.uuid4().hex
        self.receive, self.send = receive, send

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the request, by their names in lower case."""
        return dict(self._request.headers)

    @property
    def path(self) -> Mapping[str, str]:
        """What the route found in the path."""
        return self._request.path_params

    def identify(self, access: Access | None) -> None:
        """Take the caller's name, and the request's id.

        Raises:
            TandemError: it may not call, or the id cannot be one.
        """
        headers = self._request.headers
        if given := headers.get(_ID):
            messages.check_request_id(given)
            self.request_id = given
        if access is not None:
            self.caller = access.admit(headers, self._request.scope["state"]["names"])

    async def read(self, kind: type[B], most: int, seconds: float, *, unknown: bool = False) -> B:
        """The body.

        Args:
            kind: of it.
            most: bytes.
            seconds: that it may take.
            unknown: see `reading.read`.

        Raises:
            InvalidRequest: it is not what it should be, or too large.
            IdleTimeout: it did not come in time.
            Gone: the client left.
        """
        parts, size = [], 0
        try:
            async with asyncio.timeout(seconds):
                async for part in self._request.stream():
                    size += len(part)
                    if size > most:
                        raise errors.TooLarge(f"body: it has more than {most} bytes")
                    parts.append(part)
        except TimeoutError:
            raise IdleTimeout(f"the body did not come within {seconds:g} s") from None
        except ClientDisconnect:
            raise ClientGone from None
        body = b"".join(parts)
        if size > _LARGE:
            return await asyncio.to_thread(reading.read, kind, body, unknown=unknown)
        return reading.read(kind, body, unknown=unknown)

    def begin(self, status: int, headers: Mapping[str, str]) -> Any:
        """The message that starts a reply."""
        self.replied = True
        named = {_ID: self.request_id, **headers}
        return {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
        }

    async def reply(self, body: Json, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """Send a whole reply."""
        large = isinstance(body.get("choices"), list) and any(
            each.get("logprobs") for each in body["choices"]
        )
        content = await asyncio.to_thread(replies.encoded, body) if large else replies.encoded(body)
        own = {"content-type": "application/json", "content-length": str(len(content)), **headers}
        await self.reply_with(content, status, own)

    async def reply_with(self, content: bytes, status: int, headers: Mapping[str, str]) -> None:
        """Send a whole reply that is encoded already."""
        await self.send(self.begin(status, headers))
        await self.send({"type": "http.response.body", "body": content})

    async def fail(self, error: TandemError) -> None:
        """Reply with an error."""
        await self.reply(errors.body_of(error), errors.status_of(error), errors.headers_of(error))

    def cut(self) -> None:
        """End the connection of a client that does not read."""
        self._request.scope["state"]["cut"]()


Handler = Callable[[HttpCall], Awaitable[None]]


class HttpEndpoint:
    """An ASGI application for one path.

    Args:
        handler: answers a call.
        access: admits callers; None admits everybody.
    """

    def __init__(self, handler: Handler, access: Access | None = None) -> None:
        self._handler, self._access = handler, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a call, in whatever way it ends."""
        call = HttpCall(scope, receive, send)
        try:
            call.identify(self._access)
            await self._handler(call)
        except ClientGone:
            pass
        except TandemError as error:
            if notes := notes_of(error):
                _log.warning("a peer failed", error=str(error), notes=notes)
            await self._fail(call, error)
        except asyncio.CancelledError:  # the drain is over
            await self._fail(call, errors.STOPPING)
        except Exception:
            _log.exception("unexpected error in a handler")
            await self._fail(call, errors.UNEXPECTED)

    async def _fail(self, call: HttpCall, error: TandemError) -> None:
        """Tell an error, or end a reply that has begun."""
        if call.replied:
            call.cut()
        else:
            await call.fail(error)
