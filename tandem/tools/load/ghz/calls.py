"""A load's calls, from the details in ghz's JSON.

ghz's own `average` and `rps` include failed calls, and are not read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from tandem.failure import Misconfigured
from tandem.tools.load.timeline import Percentiles

_NANOSECONDS = 1e9
# ghz keeps the details of at most a million calls, some 150 bytes each.
_MOST_BYTES = 512 << 20


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        started_s: seconds after the first call's start.
        latency_s: from the call's start to its end; for a stream, its whole duration.
        status: gRPC's, as ghz spells it.
    """

    started_s: float
    latency_s: float
    status: str


@dataclass(frozen=True)
class Calls:
    """A load's calls, in the order of their starts.

    Attributes:
        calls: one by one.
        statuses: how often each occurred, by ghz's own count.
        errors: how often each error message occurred, the commonest first.
        wall_s: from the first start to the last end.
    """

    calls: Sequence[Call]
    statuses: Mapping[str, int]
    errors: Mapping[str, int]
    wall_s: float

    @classmethod
    def parse(cls, report: Mapping[str, Any]) -> Calls:
        """From a report in ghz's JSON.

        Raises:
            KeyError, TypeError, ValueError: `report` is something else.
        """
        ends: list[float] = []
        latencies: list[float] = []
        details = report["details"] or []
        for detail in details:
            # A detail's timestamp is the end of the call.
            ends.append(datetime.fromisoformat(_microseconds(detail["timestamp"])).timestamp())
            latencies.append(detail["latency"] / _NANOSECONDS)
        starts = [end - latency for end, latency in zip(ends, latencies, strict=True)]
        first = min(starts, default=0.0)
        calls = [
            Call(start - first, latency, str(detail["status"]))
            for start, latency, detail in zip(starts, latencies, details, strict=True)
        ]
        return cls(
            sorted(calls, key=lambda call: call.started_s),
            {str(status): int(count) for status, count in report["statusCodeDistribution"].items()},
            dict(Counter(report["errorDistribution"] or {}).most_common()),
            max(ends, default=0.0) - first,
        )

    @property
    def count(self) -> int:
        """All calls."""
        return sum(self.statuses.values())

    def ended(self, statuses: Sequence[str]) -> int:
        """Calls that ended with one of these statuses."""
        return sum(self.statuses.get(status, 0) for status in statuses)

    def latency(self, statuses: Sequence[str]) -> Percentiles | None:
        """Latency of the calls that ended with one of these statuses."""
        return Percentiles.of([call.latency_s for call in self.calls if call.status in statuses])

    def slower(self, seconds: float, statuses: Sequence[str]) -> int:
        """Calls that ended with one of these statuses and took longer than `seconds`."""
        slow = [call.latency_s > seconds for call in self.calls if call.status in statuses]
        return int(np.sum(slow))


def _microseconds(stamp: str) -> str:
    """A timestamp with six decimals: ghz writes any number of them, Python reads up to six."""
    whole, point, rest = stamp.partition(".")
    if not point:
        return stamp
    digits = len(rest) - len(rest.lstrip("0123456789"))
    return f"{whole}.{rest[:digits][:6].ljust(6, '0')}{rest[digits:]}"


def read(path: Path) -> tuple[str, Calls]:
    """A report's name, and its calls.

    Raises:
        Misconfigured: the report cannot be read, or is no JSON of ghz.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise Misconfigured(f"{path} is larger than {_MOST_BYTES >> 20} MiB")
        report = json.loads(path.read_text("utf-8"))
        return str(report.get("name") or path.stem), Calls.parse(report)
    except OSError as error:
        raise Misconfigured(f"cannot read {path}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Misconfigured(f"{path} is no JSON report of ghz ({reason})") from None
