"""Traces from the query API of Jaeger or Tempo.

An address is `jaeger:http://host:16686` or `tempo:http://host:3200`. By default the newest 200
traces of the last hour are read; a suffix such as `?since=2h&limit=500` changes that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qsl, quote, urlencode, urlsplit
from urllib.request import Request, urlopen

from tandem.failure import Failure, Misconfigured

_SECONDS = 60.0
_SINCE_S, _LIMIT = 3_600, 200
# Largest answer: 2,000 requests of a hundred rounds; two copies of a larger one may not fit memory.
_MAX_ANSWER_BYTES = 512 << 20
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
# The span that starts a request's trace. Passes have their own traces, too many to read.
_OPERATION, _SERVICE, _NAMESPACE = "generate", "orchestrator", "tandem"


@dataclass(frozen=True)
class Query:
    """A query, and the API that answers it.

    Attributes:
        kind: `jaeger` or `tempo`.
        url: base URL of the API.
        since_s: how far back to look, seconds.
        limit: most traces.
    """

    kind: str
    url: str
    since_s: int = _SINCE_S
    limit: int = _LIMIT

    def __str__(self) -> str:
        return f"{self.kind}:{self.url}"

    @classmethod
    def of(cls, address: str) -> Query | None:
        """The query that an address names; None if the address is the name of a file.

        Raises:
            Misconfigured: the address or its suffix is wrong.
        """
        kind, _, rest = address.partition(":")
        if kind not in _APIS or not rest:
            return None
        parts = urlsplit(rest)
        asked = dict(parse_qsl(parts.query))
        since = re.fullmatch(r"(\d{1,6})([smhd])", asked.pop("since", "1h"))
        limit = asked.pop("limit", str(_LIMIT))
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise Misconfigured(f"{kind}: needs the address of its API, such as {kind}:http://HOST")
        if since is None or not limit.isdecimal() or not int(limit) or asked:
            raise Misconfigured(f"{address}: after the ? are allowed: since=1h and limit={_LIMIT}")
        seconds = int(since[1]) * _UNITS[since[2]]
        url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        return cls(kind, url, seconds, int(limit))

    def documents(self, advance: Callable[[int], object]) -> Iterator[Any]:
        """OTLP documents, of one trace or many.

        Args:
            advance: is called with the number of bytes of each answer.

        Raises:
            Failure: the API does not answer, or not with JSON.
        """
        return _APIS[self.kind](self, advance)

    def ask(self, path: str, advance: Callable[[int], object]) -> Any:
        """The JSON at a path of the API; None if there is nothing.

        Raises:
            Failure: as `documents`.
        """
        request = Request(self.url + path, headers={"Accept": "application/json"})
        try:
            with urlopen(request, timeout=_SECONDS) as answer:
                body = answer.read(_MAX_ANSWER_BYTES + 1)
        except HTTPError as error:
            if error.code == 404:
                return None
            raise Failure(f"{self} answers {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise Failure(f"{self} does not answer: {getattr(error, 'reason', error)}") from error
        if len(body) > _MAX_ANSWER_BYTES:
            raise Failure(f"{self} answers with too much at once; ask with a smaller limit")
        advance(len(body))
        try:
            return json.loads(body)
        except ValueError as error:
            raise Failure(f"{self} does not answer in JSON; is it the API's address?") from error


def _jaeger(query: Query, advance: Callable[[int], object]) -> Iterator[Any]:
    """All traces in one answer of API v3."""
    now = time.time()
    wanted = {
        "query.service_name": _SERVICE,
        "query.operation_name": _OPERATION,
        "query.start_time_min": _rfc3339(now - query.since_s),
        "query.start_time_max": _rfc3339(now),
        # The older and the newer name of the limit.
        "query.num_traces": query.limit,
        "query.search_depth": query.limit,
    }
    found = query.ask(f"/api/v3/traces?{urlencode(wanted)}", advance)
    if found is not None:
        yield found.get("result", found) if isinstance(found, dict) else found


def _tempo(query: Query, advance: Callable[[int], object]) -> Iterator[Any]:
    """A search, then one trace after the other."""
    now = int(time.time())
    traceql = f'{{ name = "{_OPERATION}" && resource.service.namespace = "{_NAMESPACE}" }}'
    wanted = {"q": traceql, "limit": query.limit, "start": now - query.since_s, "end": now + 1}
    found = query.ask(f"/api/search?{urlencode(wanted)}", advance)
    traces = found.get("traces") if isinstance(found, dict) else None
    for each in traces if isinstance(traces, list) else ():
        identity = each.get("traceID") if isinstance(each, dict) else None
        trace = query.ask(f"/api/traces/{quote(str(identity))}", advance)
        if isinstance(trace, dict):
            yield {"resourceSpans": trace["batches"]} if "batches" in trace else trace


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


_APIS: dict[str, Callable[[Query, Callable[[int], object]], Iterator[Any]]] = {
    "jaeger": _jaeger,
    "tempo": _tempo,
}
