"""Synthetic traces with known answers, in the format that the services write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MS = 1_000_000
EPOCH_NS = 1_795_346_172_000_000_000
SERVICES = ("orchestrator", "drafter", "target")
KINDS = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3}


@dataclass
class Tape:
    """Records spans as services would write them.

    Args:
        ahead_ms: how far each service's clock is ahead.
    """

    ahead_ms: Mapping[str, float] = field(default_factory=dict)
    spans: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    count: int = 0

    def span(
        self,
        service: str,
        name: str,
        start: float,
        end: float,
        parent: str = "",
        kind: str = "INTERNAL",
        trace: int = 1,
        failed: bool = False,
        events: Mapping[str, float] | None = None,
        links: Iterable[tuple[int, str]] = (),
        **attributes: Any,
    ) -> str:
        """Write a span; times are milliseconds. In attributes' names "__" stands for a dot.

        Returns:
            Its id.
        """
        self.count += 1
        raw: dict[str, Any] = {
            "traceId": f"{trace:032x}",
            "spanId": f"{self.count:016x}",
            "name": name,
            "kind": KINDS[kind],
            "startTimeUnixNano": self._at(service, start),
            "endTimeUnixNano": self._at(service, end),
            "attributes": [
                {"key": key.replace("__", "."), "value": _value(value)}
                for key, value in attributes.items()
            ],
            "status": {"code": 2} if failed else {},
        }
        if parent:
            raw["parentSpanId"] = parent
        if events:
            raw["events"] = [
                {"name": name, "timeUnixNano": self._at(service, at)} for name, at in events.items()
            ]
        if ids := [{"traceId": f"{t:032x}", "spanId": s} for t, s in links]:
            raw["links"] = ids
        self.spans.setdefault(service, []).append(raw)
        return str(raw["spanId"])

    def _at(self, service: str, ms: float) -> str:
        return str(EPOCH_NS + round((ms + self.ahead_ms.get(service, 0.0)) * MS))

    def line(self, service: str, scope: str = "tandem") -> str:
        """All spans of a service as one line."""
        return otlp(service, self.spans.get(service, []), scope)

    def lines(self) -> list[str]:
        """A line for each service."""
        return [self.line(service) for service in self.spans]

    def write(self, path: Path) -> Path:
        """One file of all services."""
        path.write_text("\n".join(self.lines()) + "\n")
        return path

    def write_folder(self, folder: Path) -> Path:
        """A file for each service, as from `tandem up --trace-dir`, with ten spans in a line."""
        folder.mkdir(exist_ok=True)
        for service, spans in self.spans.items():
            parts = [spans[at : at + 10] for at in range(0, len(spans), 10)]
            text = "".join(otlp(service, part) + "\n" for part in parts)
            (folder / f"{service}.jsonl").write_text(text)
        return folder


def otlp(service: str, spans: Sequence[Mapping[str, Any]], scope: str = "tandem") -> str:
    """A document of OTLP-JSON."""
    named = [("service.name", service), ("service.instance.id", f"{service}-0001")]
    resource = {"attributes": [{"key": k, "value": {"stringValue": v}} for k, v in named]}
    scopes = [{"scope": {"name": scope}, "spans": list(spans)}]
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [_value(each) for each in value]}}


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a round's parts."""

    network: float = 0.5  # one way
    queue: float = 0.25
    gather: float = 0.5  # of the target
    draft_gather: float = 0.125  # before each pass
    draft_pass: float = 1.0
    draw: float = 0.25  # after each pass
    verify_pass: float = 5.0
    accept: float = 0.75
    reply: float = 0.25
    detokenize: float = 0.5
    between: float = 1.0  # of the orchestrator, at a round's end

    def draft_ms(self, gamma: int) -> float:
        """The drafter's span; without a draft there is none."""
        if not gamma:
            return 0.0
        passes = gamma * (self.draft_gather + self.draft_pass + self.draw)
        return self.queue + passes + self.reply

    def verify_ms(self) -> float:
        """The target's span."""
        return self.queue + self.gather + self.verify_pass + self.accept + self.reply

    def round_ms(self, gamma: int) -> float:
        """A whole round."""
        messages = 4 if gamma else 2
        calls = self.draft_ms(gamma) + self.verify_ms() + messages * self.network
        return calls + self.detokenize + self.between


COSTS = Costs()
# Of a request around its rounds: tokenize, open with both prefills, first token, close.
OPENED_MS = 12.5
CLOSE_MS = 1.0
TAIL_MS = 0.5


def request_ms(rounds: Sequence[tuple[int, int]], costs: Costs = COSTS) -> float:
    """Wall time of `request` below."""
    inside = sum(costs.round_ms(gamma) for gamma, _ in rounds)
    return OPENED_MS + inside + CLOSE_MS + TAIL_MS


def request(
    tape: Tape,
    rounds: Sequence[tuple[int, int]],
    *,
    trace: int = 1,
    start: float = 0.0,
    costs: Costs = COSTS,
    batch: int = 1,
    verifier: str = "block",
    temperature: float = 1.0,
    name: str = "",
    inside: bool = False,
) -> None:
    """Write a whole request.

    Args:
        tape: to write on.
        rounds: draft length and kept tokens of each.
        trace: its id.
        start: milliseconds.
        costs: of each round.
        batch: sequences that share its passes.
        verifier: of each round.
        temperature: of its sampling.
        name: its request id; by default made of the trace's.
        inside: the target says that it drafted itself.
    """
    end = start + request_ms(rounds, costs)
    root = tape.span(
        "orchestrator",
        "generate",
        start,
        end,
        parent="b7ad6b7169203331",
        kind="SERVER",
        trace=trace,
        events={"first_token": start + OPENED_MS},
        tandem__request_id=name or f"request-{trace}",
        tandem__gamma=max((gamma for gamma, _ in rounds), default=0),
        gen_ai__request__temperature=temperature,
        gen_ai__usage__output_tokens=1 + sum(accepted + 1 for _, accepted in rounds),
    )
    _open(tape, trace, root, start)
    at = start + OPENED_MS
    for number, (gamma, accepted) in enumerate(rounds, 1):
        _round(tape, trace, root, at, number, gamma, accepted, costs, batch, verifier, inside)
        at += costs.round_ms(gamma)
    tape.span("orchestrator", "close", at, at + CLOSE_MS, root, trace=trace)


def _open(tape: Tape, trace: int, root: str, at: float) -> None:
    """1 ms of tokenize, 10 of open, 1 of detokenize, 0.5 of nothing in between."""
    tape.span("orchestrator", "tokenize", at, at + 1, root, trace=trace)
    opening = tape.span("orchestrator", "open", at + 1, at + 11, root, trace=trace)
    call = tape.span("orchestrator", "call.prefill", at + 1.5, at + 10.5, opening, "CLIENT", trace)
    prefill = tape.span("target", "prefill", at + 2, at + 10, call, "SERVER", trace)
    _parts(
        tape,
        *("target", "prefill", trace, prefill, at + 2),
        (("queue", 0.5), ("gather", 0.5), ("forward", 6.0), ("accept", 0.5)),
    )
    beside = tape.span("orchestrator", "call.prefill", at + 1.5, at + 5.5, root, "CLIENT", trace)
    drafters = tape.span("drafter", "prefill", at + 2, at + 5, beside, "SERVER", trace)
    _parts(tape, "drafter", "prefill", trace, drafters, at + 2, (("queue", 0.5), ("forward", 2.0)))
    tape.span("orchestrator", "detokenize", at + 11.5, at + 12.5, root, trace=trace)


def _parts(
    tape: Tape,
    service: str,
    step: str,
    trace: int,
    parent: str,
    at: float,
    parts: Iterable[tuple[str, float]],
    **attributes: Any,
) -> None:
    """A step's children, back to back."""
    for part, lasts in parts:
        tape.span(service, f"{step}.{part}", at, at + lasts, parent, trace=trace, **attributes)
        at += lasts


def _round(
    tape: Tape,
    trace: int,
    root: str,
    at: float,
    number: int,
    gamma: int,
    accepted: int,
    costs: Costs,
    batch: int,
    verifier: str,
    inside: bool,
) -> None:
    end = at + costs.round_ms(gamma)
    said: dict[str, Any] = {"tandem__round": number, "tandem__depth": gamma}
    said["tandem__nodes"] = gamma
    decided: dict[str, Any] = {"tandem__accepted": accepted, "tandem__verifier": verifier}
    round_ = tape.span("orchestrator", "round", at, end, root, trace=trace, **said, **decided)
    queue = ("queue", costs.queue)
    a_pass = (("gather", costs.draft_gather), ("forward", costs.draft_pass), ("draw", costs.draw))
    sides = (
        (
            "draft",
            "drafter",
            costs.draft_ms(gamma),
            (queue, *a_pass * gamma, ("reply", costs.reply)),
        ),
        (
            *("verify", "target", costs.verify_ms()),
            (
                queue,
                ("gather", costs.gather),
                ("forward", costs.verify_pass),
                ("accept", costs.accept),
            ),
        ),
    )
    for step, service, lasts, parts in sides if gamma else sides[1:]:
        back = at + lasts + 2 * costs.network
        call = tape.span("orchestrator", f"call.{step}", at, back, round_, "CLIENT", trace)
        begin = at + costs.network
        mine = said | (decided if step == "verify" else {}) | {"tandem__batch_size": batch}
        mine |= {"tandem__inside": True} if inside else {}
        server = tape.span(service, step, begin, begin + lasts, call, "SERVER", trace, **mine)
        _parts(tape, service, step, trace, server, begin, parts, tandem__batch_size=batch)
        at = back
    tape.span("orchestrator", "detokenize", at, at + costs.detokenize, round_, trace=trace)


def recorded(
    path: Path, texts: int, rounds: Sequence[tuple[int, int]], costs: Costs = COSTS, **more: Any
) -> Path:
    """A file of `texts` requests, one after the other."""
    tape = Tape()
    for trace in range(1, texts + 1):
        start = (trace - 1) * (request_ms(rounds, costs) + 1)
        request(tape, rounds, trace=trace, start=start, costs=costs, **more)
    return tape.write(path)
