"""Drafts for vLLM's passes: a thread that talks to drafters, asked by the thread that computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog
import uvloop

from tandem.common.v1 import common_pb2
from tandem.peers.text.record import TextRecord, TextSpans
from tandem.rpc.messages import PROTOCOL_VERSION
from tandem.speculation.request.sampling import MAX_SEED
from tandem.telemetry.tracing.spans import Span
from tandem_vllm.pool import DrafterPool
from tandem_vllm.settings import PluginSettings
from tandem_vllm.text import Backoff, Opening, RemoteDraft, RemoteText

_log = structlog.get_logger(__name__)

T = TypeVar("T")

# The loop answers so much later than a draft may come; a loop that does not is not waited for.
_LOOP_SECONDS = 5.0
# Between two looks at texts that are in no pass.
_LOOK_SECONDS = 5.0
# Passes in a row whose drafts were all late, after which the log says so.
_MANY_LATE = 4
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
        self._turns = 0
        self._backoff = Backoff()
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

    def _result(self, coroutine: Any, seconds: float | None = None) -> Any:
        """What a coroutine gives on the thread's loop.

        Raises:
            TimeoutError: it gives nothing for so long.
        """
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(seconds)

    async def _begin(self, target: common_pb2.ModelInfo) -> DrafterPool:
        pool = DrafterPool(self._settings, target)
        await pool.begin()
        self._looking = asyncio.create_task(self._look_after())
        return pool

    async def _look_after(self) -> None:
        """Let drafters of texts go that are in no pass."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for text in self._texts.values():
                text.rest()

    def open(self, openings: Iterable[Opening]) -> None:
        """Have texts opened, beside what the caller computes meanwhile."""
        self._later(self._open, list(openings))

    def _later(self, function: Callable[[list[T]], None], items: list[T]) -> None:
        if items:
            self._loop.call_soon_threadsafe(function, items)

    def _open(self, openings: list[Opening]) -> None:
        for opening in openings:
            try:
                self._begin_text(opening)
            except Exception:
                _log.exception("a text has no drafts", request=opening.name)

    def _begin_text(self, opening: Opening) -> None:
        before = self._texts.pop(opening.name, None)
        if before is not None:  # a session that goes on: no number decides twice
            before.end()
            self._turns += 1
            seed = (opening.sampling.seed ^ (self._turns << 32)) & MAX_SEED
            opening = replace(opening, sampling=replace(opening.sampling, seed=seed))
        if max(opening.token_ids) >= self._vocab_size:  # it stands for an image, or the like
            return
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
        seconds = self._settings.wait_seconds + _LOOP_SECONDS
        found: dict[str, RemoteDraft] = self._result(self._draft(asks, verified), seconds)
        return found

    async def _draft(
        self, asks: Sequence[DraftAsk], verified: VerifiedPass | None
    ) -> dict[str, RemoteDraft]:
        if verified is not None:
            self._trace(verified)
        waits, tasks = self._backoff.is_over, {}
        for ask in asks:
            text = self._texts.get(ask.name)
            if text is not None:
                text.extend(ask.token_ids)
                task = text.ask(ask.gamma) if waits else None
                if task is not None:
                    tasks[task] = ask.name, text
        if not tasks:
            return {}
        done, late = await asyncio.wait(tasks, timeout=self._settings.wait_seconds)
        found = {}
        for task in done:
            name, text = tasks[task]
            text.note(late=False)
            draft = _report(task)
            if draft is not None:
                found[name] = draft
        for task in late:
            tasks[task][1].note(late=True)
            task.add_done_callback(_report)
        if found or late:
            self._note(late=not found)
        return found

    def _note(self, *, late: bool) -> None:
        """Whether no draft of a pass came in time."""
        if self._backoff.late >= _MANY_LATE and not late:
            _log.info("drafts come in time again")
        self._backoff.note(late=late)
        if self._backoff.late == _MANY_LATE:
            _log.warning(
                "drafts come too late: most passes go on without asking",
                wait_seconds=self._settings.wait_seconds,
            )

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
        self._looking.cancel()
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
