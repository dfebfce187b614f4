"""Answers a call that generates: its texts at once, whole or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import structlog

from orchestrator.front.calls import OpenCalls
from orchestrator.front.client import ReadingClient
from orchestrator.front.http import errors, replies
from orchestrator.front.http.log_probs import TextLogProbs
from orchestrator.front.http.replies import Form, Json, Usage
from orchestrator.front.http.tools import ToolReader
from orchestrator.front.texts import Texts
from tandem.errors import IdleTimeout, TandemError
from tandem.peers.text.record import HTTP
from tandem.peers.text.values import Request, Round, Summary

_log = structlog.get_logger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class WantedText:
    """A text of a call.

    Attributes:
        request: of it.
        prompt: its number among the call's prompts.
        before: what its text begins with: the prompt, where it is echoed.
        begins: where the prompt's tokens begin in `before`, where their log probabilities are
            asked for; None for one that is not in it.
    """

    request: Request
    prompt: int
    before: str = ""
    begins: Sequence[int | None] = ()


@dataclass(frozen=True)
class ReplyDetail:
    """How much of texts is told.

    Attributes:
        tokens: also each token with its origin, and where the time went.
        stop_strings: texts end with the stop string that ended them.
        usage: a chunk at the end has the usage.
        tools: names of those that the model may call; their calls are told apart from text.
        most_calls: of tools, that are told of a text; None for all.
    """

    tokens: bool = False
    stop_strings: bool = False
    usage: bool = False
    tools: frozenset[str] = frozenset()
    most_calls: int | None = None


class ClientGone(Exception):
    """The client has left."""


class HttpAnswer:
    """The texts of a call.

    Args:
        texts: makes them.
        calls: know of them.
        form: of replies.
        telling: what the replies say of a text.
        wanted: the texts.
        client: makes a client for a text.
        metadata: of the call, for `Texts.generate`.
    """

    def __init__(
        self,
        texts: Texts,
        calls: OpenCalls,
        form: Form,
        telling: ReplyDetail,
        wanted: Sequence[WantedText],
        client: Callable[[], ReadingClient],
        metadata: Mapping[str, str],
    ) -> None:
        self._texts, self._calls, self._client = texts, calls, client
        self._form, self._telling, self._wanted = form, telling, wanted
        self._metadata = metadata
        self._usage = Usage()

    async def whole(self, receive: Receive) -> Json:
        """The reply, once all texts have ended.

        Raises:
            TandemError: a text was refused or failed.
            Gone: the client left.
        """
        choices: list[Json] = [{} for _ in self._wanted]

        async def make(index: int, wanted: WantedText) -> None:
            parts, tokens, log_probs = [wanted.before], list[Json](), self._log_probs(wanted)

            async def take(event: Round | Summary) -> None:
                if isinstance(event, Round):
                    parts.extend(token.text for token in event.tokens)
                    if self._telling.tokens:
                        tokens.extend(replies.tokens_of(event))
                    if log_probs is not None:
                        log_probs.add(event)
                    return
                text = "".join(parts) + self._end_of(event)
                told, calls = self._reader().push(text, last=True)
                finish = replies.finish_of(event, bool(calls))
                choices[index] = self._form.choice(index, told, calls, finish)
                if log_probs is not None:
                    # Those of a long prompt take a second.
                    choices[index]["logprobs"] = await asyncio.to_thread(
                        self._form.log_probs, log_probs.within(len(text))
                    )
                if self._telling.tokens:
                    stages = replies.stages_of(event)
                    choices[index]["tandem"] = {"tokens": tokens, "stages_ms": stages}

            # Nothing waits for a client that gets all at the end.
            await self._make(wanted, ReadingClient(self._client().name), take)

        await self._all(make, receive)
        return self._form.reply(choices, self._usage.body())

    async def stream(self, receive: Receive, send: Send, begin: Callable[[], Any]) -> None:
        """Server-sent events: a round of a text is a chunk.

        Args:
            receive: of ASGI.
            send: of ASGI.
            begin: makes the message that starts the response; called with the first event.

        Raises:
            TandemError: a text was refused or failed before anything was sent.
            IdleTimeout: the client read nothing for too long; nothing more can be sent.
            Gone: the client left.
        """
        begun, sending = False, asyncio.Lock()

        async def put(*chunks: bytes, more: bool = True) -> None:
            nonlocal begun
            async with sending:
                if not begun:
                    begun = True
                    await send(begin())
                body = b"".join(chunks)
                if body or not more:
                    await send({"type": "http.response.body", "body": body, "more_body": more})

        async def make(index: int, wanted: WantedText) -> None:
            client = self._client()
            parts = self._parts(index, wanted)
            await self._make(wanted, client, lambda event: client.take(put(*parts(event))))

        try:
            await self._all(make, receive)
        except (IdleTimeout, ClientGone):
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not begun:
                raise
            end = [replies.event_of(errors.body_of(_told(error)))]
        else:
            usage = self._form.chunk(None, self._usage.body())
            end = [replies.event_of(usage)] if self._telling.usage else []
            end.append(replies.DONE)
        client = self._client()
        try:
            await client.take(put(*end, more=False))
        finally:
            client.close()

    def _parts(self, index: int, wanted: WantedText) -> Callable[[Round | Summary], list[bytes]]:
        """What is sent of each event of a text."""
        opening = self._form.first(index)
        before, called, reader = wanted.before, 0, self._reader()
        characters, log_probs = 0, self._log_probs(wanted)

        def parts(event: Round | Summary) -> list[bytes]:
            nonlocal opening, before, called, characters
            if isinstance(event, Round):
                text = before + "".join(token.text for token in event.tokens)
            else:
                text = before + self._end_of(event)
            characters += len(text)
            told, calls = reader.push(text, last=isinstance(event, Summary))
            numbered = [call.body(called + i) for i, call in enumerate(calls)]
            called += len(calls)
            choices = [] if opening is None else [opening]
            opening, before = None, ""
            if isinstance(event, Summary):
                finish = replies.finish_of(event, called > 0)
                choices.append(self._form.last(index, told, numbered, finish))
                if self._telling.tokens:
                    choices[-1]["tandem"] = {"stages_ms": replies.stages_of(event)}
            elif told or numbered or self._telling.tokens or log_probs is not None:
                choices.append(self._form.delta(index, told, numbered))
                if self._telling.tokens:
                    choices[-1]["tandem"] = {
                        "round": event.number,
                        "gamma": event.gamma,
                        "tokens": replies.tokens_of(event),
                    }
            if log_probs is not None:
                if isinstance(event, Round):
                    log_probs.add(event)
                if own := log_probs.within(characters):
                    choices[-1]["logprobs"] = self._form.log_probs(own)
            return [replies.event_of(self._form.chunk(each)) for each in choices]

        return parts

    def _log_probs(self, wanted: WantedText) -> TextLogProbs | None:
        """Of one text; None where none are asked for."""
        if wanted.request.log_probs is None:
            return None
        has_text = self._texts.validator.codec.has_text
        return TextLogProbs(wanted.begins, len(wanted.before), has_text=has_text)

    def _reader(self) -> ToolReader:
        """Of one text."""
        return ToolReader(self._telling.tools, self._telling.most_calls)

    def _end_of(self, summary: Summary) -> str:
        """What a text has after its tokens: the stop string that ended it, where the text is to
        have it."""
        return summary.tail + (summary.stop_string if self._telling.stop_strings else "")

    async def _make(
        self,
        wanted: WantedText,
        client: ReadingClient,
        take: Callable[[Round | Summary], Awaitable[None]],
    ) -> None:
        """Make a text for a client."""
        events = self._texts.generate(wanted.request, None, self._metadata, client, HTTP)
        try:
            async with self._calls.serving(client), aclosing(events):
                async for event in events:
                    if isinstance(event, Round):
                        self._usage.add_round(event)
                    else:
                        self._usage.add(wanted.prompt, event)
                    try:
                        await take(event)
                    except IdleTimeout as late:
                        # Into the text, so that its span and its log say why it ended.
                        await events.athrow(late)
        finally:
            client.close()

    async def _all(
        self, make: Callable[[int, WantedText], Awaitable[None]], receive: Receive
    ) -> None:
        """Make all texts at once; the first failure, or a client that leaves, ends the others."""

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            raise ClientGone

        # More at once than places would only wait for each other.
        places = asyncio.Semaphore(max(self._texts.queue.places, 1))

        async def in_turn(index: int, wanted: WantedText) -> None:
            async with places:
                await make(index, wanted)

        makers = {asyncio.ensure_future(in_turn(*each)) for each in enumerate(self._wanted)}
        watch = asyncio.ensure_future(leave())
        left = set(makers)
        try:
            while left:
                done, _ = await asyncio.wait({*left, watch}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                left -= done
        finally:
            for task in (watch, *makers):
                task.cancel()
            await asyncio.gather(watch, *makers, return_exceptions=True)


def _told(error: BaseException) -> TandemError:
    """What a client is told of an error in the middle of its texts."""
    if isinstance(error, TandemError):
        return error
    if isinstance(error, asyncio.CancelledError):  # the drain is over
        return errors.STOPPING
    _log.error("unexpected error in a text", exc_info=error)
    return errors.UNEXPECTED
