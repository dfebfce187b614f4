"""When the tokens of one text arrived, and the percentiles of many such times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from google.protobuf import json_format

from tandem.orchestrator.v1 import orchestrator_pb2 as pb


@dataclass(frozen=True)
class Timeline:
    """A text as its client saw it; times are seconds of one clock.

    Attributes:
        intended_s: when the text was due. An open loop may request it later; latency still counts
            from here, or a slow server would hide its own delays.
        asked_s: when the text was requested.
        arrivals: time and number of tokens of each message with tokens.
        ended_s: when the last message or the error arrived.
        error: status and details of a failed call; empty otherwise.
        summary: Tandem's last message; None after an error, or for another system.
        retry_s: how long the error says to wait before the next call, if it does; not in the JSON.
    """

    intended_s: float
    asked_s: float
    arrivals: tuple[tuple[float, int], ...]
    ended_s: float
    error: str = ""
    summary: pb.Summary | None = None
    retry_s: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def latency_s(self) -> float:
        """From the intended start to the last token."""
        return self.arrivals[-1][0] - self.intended_s

    @property
    def time_to_first_token_s(self) -> float:
        """TTFT: from the intended start to the first message with tokens."""
        return self.arrivals[0][0] - self.intended_s

    @property
    def time_per_output_token_s(self) -> float:
        """TPOT: (latency - TTFT) / (tokens - 1); 0 for a single token."""
        spent = self.latency_s - self.time_to_first_token_s
        return spent / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """ITL: raw gaps between messages; each message has all tokens of a round."""
        times = [time for time, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def rounds_s(self) -> list[float]:
        """Times of rounds: the orchestrator's if it drafted, else the gaps."""
        if self.summary is not None and self.summary.stages.round_wall_ns:
            return [wall / 1e9 for wall in self.summary.stages.round_wall_ns]
        return self.gaps_s

    @property
    def beside_models_s(self) -> list[float]:
        """Each drafted round's wall time minus its forward passes."""
        if self.summary is None:
            return []
        stages = self.summary.stages
        pairs = zip(stages.round_wall_ns, stages.round_model_ns, strict=True)
        return [(wall - model) / 1e9 for wall, model in pairs]

    @property
    def lag_s(self) -> float:
        """How much later than due the text was requested: the client's own delay."""
        return self.asked_s - self.intended_s

    def as_json(self) -> dict[str, Any]:
        """For json.dumps; `from_json` reads it."""
        summary = self.summary and json_format.MessageToDict(
            self.summary, preserving_proto_field_name=True
        )
        return {
            "intended_s": self.intended_s,
            "asked_s": self.asked_s,
            "arrivals": self.arrivals,
            "ended_s": self.ended_s,
            "error": self.error,
            "summary": summary,
        }

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Timeline:
        """What `as_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: `read` is something else.
        """
        summary = read["summary"]
        try:
            parsed = None if summary is None else json_format.ParseDict(summary, pb.Summary())
        except json_format.ParseError as error:
            raise ValueError(str(error)) from error
        return cls(
            float(read["intended_s"]),
            float(read["asked_s"]),
            tuple((float(at), int(tokens)) for at, tokens in read["arrivals"]),
            float(read["ended_s"]),
            str(read["error"]),
            parsed,
        )


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p95: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """The percentiles of times in seconds; None if there are none."""
        if not seconds:
            return None
        p50, p95, p99 = np.percentile(seconds, (50, 95, 99)) * 1e3
        return cls(float(p50), float(p95), float(p99), float(np.mean(seconds)) * 1e3)
