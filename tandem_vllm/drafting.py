"""Drafts for vLLM's passes: a thread that talks to drafters, asked by the thread that computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import uvloop

from orchestrator.text.record import TextRecord, TextSpans
from tandem.common.v1 import common_pb2
from tandem.rpc.messages import PROTOCOL_VERSION
from tandem.telemetry.tracing.spans import Span
from tandem_vllm.pool import DrafterPool
from tandem_vllm.settings import PluginSettings
from tandem_vllm.text import Opening, RemoteDraft, RemoteText

_log = structlog.get_logger(__name__)

T = TypeVar("T")

# How long the end of the process may take to close connections.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class DraftAsk:
    """A text that wants a draft.

    Attributes:
        name: of its request.
        token_ids: of the text since its opening, or since it was asked for last.
        gamma: the longest draft.
    """

    name: str
    token_ids: list[int]
    gamma: int


@dataclass(frozen=True)
class VerifiedPass:
    """A pass of vLLM that decided drafts.

    Attributes:
        start_ns: nanoseconds since the epoch.
        end_ns: likewise.
        tokens: that it computed.
        names: of the requests in it.
    """

    start_ns: int
    end_ns: int
    tokens: int
    names: Sequence[str]


class DraftingThread:
    """Opens texts on drafters, and asks for their drafts. Methods are called from one thread.

    Args:
        settings: name the drafters.
        target: vLLM's model, as a target describes itself.

    Raises:
        StartupError: the settings are unfit.
    """

    def __init__(self, settings: PluginSettings, target: common_pb2.ModelInfo) -> None:
        target.protocol_version = PROTOCOL_VERSION
        self._settings = settings
        self._vocab_size = target.vocab_size
        self._texts: dict[str, RemoteText] = {}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="drafts", daemon=True)
        self._thread.start()
        try:
            self._pool: DrafterPool = self._result(self._begin(target))
        except BaseException:
            self._stop()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _result(self, coroutine: Any) -> Any:
        """What a coroutine gives on the thread's loop."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    async def _begin(self, target: common_pb2.ModelInfo) -> DrafterPool:
        pool = DrafterPool(self._settings, target)
        await pool.begin()
        return pool

    def open(self, openings: Iterable[Opening]) -> None:
        """Have texts opened, beside what the caller computes meanwhile."""
        self._later(self._open, list(openings))

    def _later(self, function: Callable[[list[T]], None], items: list[T]) -> None:
        if items:
            self._loop.call_soon_threadsafe(function, items)

    def _open(self, openings: list[Opening]) -> None:
        for opening in openings:
            self._end([opening.name])
            metadata = {"traceparent": opening.traceparent} if opening.traceparent else {}
            record = TextRecord(TextSpans(metadata))
            record.spans.describe(
                {"tandem.request_id": opening.name, "tandem.verifier": self._settings.verifier}
            )
            self._texts[opening.name] = RemoteText(
                self._pool, opening, self._vocab_size, self._settings.reserve_tokens, record
            )

    def draft(
        self, asks: Sequence[DraftAsk], verified: VerifiedPass | None = None
    ) -> dict[str, RemoteDraft]:
        """The drafts of texts that are there in time; waits at most `WAIT_SECONDS`.

        Args:
            asks: of opened texts.
            verified: the pass before, for traces.
        """
        if not asks:
            return {}
        found: dict[str, RemoteDraft] = self._result(self._draft(asks, verified))
        return found

    async def _draft(
        self, asks: Sequence[DraftAsk], verified: VerifiedPass | None
    ) -> dict[str, RemoteDraft]:
        if verified is not None:
            self._trace(verified)
        tasks = {}
        for ask in asks:
            text = self._texts.get(ask.name)
            task = None if text is None else text.ask(ask.token_ids, ask.gamma)
            if task is not None:
                tasks[task] = ask.name
        if not tasks:
            return {}
        done, late = await asyncio.wait(tasks, timeout=self._settings.wait_seconds)
        for task in late:
            task.add_done_callback(_report)
        found = {}
        for task in done:
            draft = _report(task)
            if draft is not None:
                found[tasks[task]] = draft
        return found

    def _trace(self, verified: VerifiedPass) -> None:
        texts = [self._texts[name] for name in verified.names if name in self._texts]
        links = [context for text in texts if (context := text.record.spans.context) is not None]
        if links:
            span = Span("pass", None, links=links, start_ns=verified.start_ns)
            span.attributes = {
                "tandem.batch_size": len(verified.names),
                "tandem.tokens": verified.tokens,
            }
            span.end(verified.end_ns)

    def end(self, names: Iterable[str]) -> None:
        """Texts are over; harmless for those that were never opened."""
        self._later(self._end, list(names))

    def _end(self, names: list[str]) -> None:
        for name in names:
            text = self._texts.pop(name, None)
            if text is not None:
                text.end()

    def close(self) -> None:
        """End all texts, and close all connections."""
        if self._loop.is_running():
            try:
                future = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
                future.result(_END_SECONDS)
            except TimeoutError:
                _log.warning("drafters were not left in order", seconds=_END_SECONDS)
            self._stop()

    async def _close(self) -> None:
        self._end(list(self._texts))
        await self._pool.close()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)


def _report(task: asyncio.Task[RemoteDraft | None]) -> RemoteDraft | None:
    """What a text's task gave; a defect of ours is logged and costs the draft alone."""
    if task.cancelled():
        return None
    if error := task.exception():
        _log.error("a draft failed", exc_info=error)
        return None
    return task.result()
