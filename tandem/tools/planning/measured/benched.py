"""A measurement from the JSON of `tandem bench`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.failure import Failure, Misconfigured
from tandem.tools.load.timeline import Timeline
from tandem.tools.planning.measured.measurement import MeasuredText, Measurement
from tandem.tools.traces.prediction.basis import LONGEST
from tandem.tools.traces.prediction.costs import Curve
from tandem.tools.traces.prediction.speculation import continued, kept

_NS = 1e9
_MOST_BYTES = 1 << 30


def is_bench(path: Path) -> bool:
    """Whether a file is one JSON object over several lines: trace files have one on each line."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline(8).strip() == "{"
    except (OSError, ValueError):
        return False


def read(path: Path) -> list[Timeline]:
    """The texts of a run, or of all rates of a sweep.

    Raises:
        Misconfigured: the file cannot be read, or is something else.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise Misconfigured(f"{path} is larger than {_MOST_BYTES >> 30} GiB")
        found: Any = json.loads(path.read_text("utf-8"))
        loads = found.get("levels", [found])
        return [Timeline.from_json(text) for load in loads for text in load["timelines"]]
    except OSError as error:
        raise Misconfigured(f"cannot read {path}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Misconfigured(f"{path} is no JSON of `tandem bench --json` ({reason})") from None


def measured_from(texts: Sequence[Timeline]) -> Measurement:
    """A measurement from texts' summaries.

    Raises:
        Failure: no text that ended well used drafts.
    """
    summaries = [text.summary for text in texts if text.summary is not None and not text.error]
    drafted = [summary for summary in summaries if summary.drafted_tokens]
    if not drafted:
        raise Failure("no text that ended well was drafted")
    rounds = sum(sum(1 for gamma in summary.gammas if gamma) for summary in drafted)
    gammas = Counter(gamma for summary in drafted for gamma in summary.gammas if gamma)

    def total(name: str) -> float:
        return float(sum(getattr(summary.stages, name) for summary in drafted)) / _NS

    verify = total("verify_forward_busy_ns") + total("verify_accept_busy_ns")
    draft = total("draft_forward_busy_ns") + total("draft_draw_busy_ns")
    waits = sum(
        total(f"{step}_{part}_busy_ns")
        for step in ("draft", "verify")
        for part in ("queue", "gather")
    )
    # Queueing is left out: the simulation has queues of its own.
    prefill = sum(total(f"target_prefill{part}_busy_ns") for part in ("", "_queue", "_gather"))
    wall = sum(sum(summary.stages.round_wall_ns) for summary in drafted) / _NS
    passes = sum(gamma * count for gamma, count in gammas.items())
    own = total("tokenize_ns") + total("detokenize_ns") + total("own_ns")
    notes = (
        "a run of `tandem bench` does not tell batch sizes: a pass takes its mean, whatever it"
        " holds; plan from traces for large batches",
        "a draft's time is proportional to its length, a verification's does not depend on it",
    )
    return Measurement(
        gamma=gammas.most_common(1)[0][0],
        verify=Curve({1.0: verify / rounds}, {1.0: rounds}),
        draft=Curve({1.0: draft / passes}, {1.0: passes}),
        shares=_shares(drafted, gammas),
        texts=[_shape(summary) for summary in drafted],
        opening_s=max(total("time_to_first_token_ns") - prefill, 0.0) / len(drafted),
        round_s=max(wall - verify - draft - waits, 0.0) / rounds,
        orchestrator_text_s=own / len(drafted),
        orchestrator_round_s=0.0,
        notes=notes,
    )


def _shape(summary: Any) -> MeasuredText:
    stages = summary.stages
    return MeasuredText(
        max(summary.new_tokens, 1),
        stages.target_prefill_busy_ns / _NS,
        stages.drafter_prefill_busy_ns / _NS,
    )


def _shares(drafted: Sequence[Any], gammas: Counter[int]) -> list[float]:
    """For each place, the share of drafts that kept its token."""
    longest = max(gammas)
    accepted = [0] * longest
    for summary in drafted:
        for place, count in enumerate(summary.accepted_per_position):
            accepted[place] += count
    # A draft that was cut at the text's end tells nothing about the places beyond its length.
    long_enough = [sum(n for gamma, n in gammas.items() if gamma > p) for p in range(longest)]
    shares = [kept_ / had for kept_, had in zip(accepted, long_enough, strict=True)]
    before = [1.0, *shares[:-1]]
    onward = [
        min(now / then, 1.0) if then else 0.0 for now, then in zip(shares, before, strict=True)
    ]
    reached = [round(then * had) for then, had in zip(before, long_enough, strict=True)]
    return kept(continued(onward, reached, max(LONGEST, longest)))
