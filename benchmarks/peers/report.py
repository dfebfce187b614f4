"""The results: which ways are exact, how fast they are, and tables of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.measure.tables import table_of
from benchmarks.peers.law import Law, common_start
from benchmarks.peers.roster import OURS
from benchmarks.peers.spread import Spread, ratios
from benchmarks.peers.turns import Found, speeds
from benchmarks.peers.way import Job, Measurement, Way

# A greedy text counts as equal if at least this share of it is. A pass with another number of rows
# may decide a near tie differently, and then everything after it differs.
_SAME = 0.5


@dataclass(frozen=True)
class Row:
    """A way at a job.

    Attributes:
        way: engine and draft length.
        speed: tokens a second.
        ratio: its speed / that of the strongest exact peer, turn by turn; None without such a peer.
        exact: whether its texts passed the test; None if it was not tested.
        why: the reason, in words.
        surplus: tokens beyond the requested ones, per requested token.
    """

    way: Way
    speed: Spread
    ratio: Spread | None
    exact: bool | None
    why: str
    surplus: float


@dataclass(frozen=True)
class Section:
    """All ways at one job.

    Attributes:
        job: temperature, number and length of the texts.
        strongest: the fastest exact way that is not Tandem's; None if there is none.
        rows: the strongest exact peer's, then the others', the fastest first.
    """

    job: Job
    strongest: Way | None
    rows: tuple[Row, ...]


def sections(found: Found, laws: Mapping[str, Law]) -> Iterator[Section]:
    """The sections of the report, one for each job."""
    for job, ways in found.items():
        rates = speeds(ways)
        verdicts = {way: exactness(way, job, ways, laws) for way in ways}
        spreads = {way: Spread.of(list(own.values())) for way, own in rates.items()}
        peers = [way for way in ways if verdicts[way][0] and way.engine not in OURS]
        strongest = max(peers, key=lambda way: spreads[way].median, default=None)
        rows = []
        for way in sorted(ways, key=lambda w: (w != strongest, -spreads[w].median)):
            by_turn = ratios(rates[way], rates[strongest]) if strongest else []
            ratio = Spread.of(by_turn) if by_turn else None
            own = ways[way]
            beyond = sum(m.surplus for m in own) / sum(len(t) for m in own for t in m.texts)
            rows.append(Row(way, spreads[way], ratio, *verdicts[way], beyond))
        yield Section(job, strongest, tuple(rows))


def exactness(
    way: Way,
    job: Job,
    ways: Mapping[Way, Sequence[Measurement]],
    laws: Mapping[str, Law],
) -> tuple[bool | None, str]:
    """Whether a way's texts equal those of its engine without drafts, and the reason in words."""
    if not way.gamma:
        return True, "by definition"
    if job.temperature:
        law = laws.get(way.engine)
        if law is None:
            return None, "not tested"
        return law.holds, f"p {law.p:.2g}" if law.holds else f"another law: {_said(law)}"
    plain = {m.turn: m.texts for m in ways.get(Way(way.engine, 0), ())}
    starts = [
        common_start(ours, theirs)
        for m in ways[way]
        for ours, theirs in zip(m.texts, plain.get(m.turn, ()), strict=False)
    ]
    if not starts:
        return None, "not tested"
    same = sum(start == 1 for start in starts) / len(starts)
    return median(starts) >= _SAME, f"{same:.0%} of texts as plain"


def _said(law: Law) -> str:
    worst = law.worst
    return f"{worst.statistic:,.0f} on {worst.degrees}"


def table(section: Section) -> Table:
    """A section as a table; intervals are of medians."""
    shown = Table(title=str(section.job), title_justify="left")
    for name in ("way", "tokens/s", "interval", "turns", "x strongest exact peer", "exact"):
        shown.add_column(name, justify="left" if name in ("way", "exact") else "right")
    for row in section.rows:
        speed, ratio = row.speed, row.ratio
        beside = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-"
        word = {True: "yes", False: "NO", None: "?"}[row.exact]
        more = f"; {row.surplus:.0%} tokens too many" if row.surplus else ""
        shown.add_row(
            str(row.way),
            f"{speed.median:,.1f}",
            f"{speed.low:,.1f} to {speed.high:,.1f}",
            str(speed.count),
            "1" if row.way == section.strongest else beside,
            f"{word}, {row.why}{more}",
            style="bold" if row.way.engine in OURS else None,
        )
    return shown


def law_table(laws: Mapping[str, Law], gammas: Mapping[str, int], tokens: int) -> Table:
    """A table that compares plain with speculative sampling.

    Args:
        laws: of each engine with drafts and without.
        gammas: draft lengths by engine.
        tokens: of each text.
    """
    rows = (
        {
            "engine": engine,
            "drafts of": gammas[engine],
            "texts": " + ".join(map(str, law.texts)),
            "worst table": law.worst.what,
            "chi-square": f"{law.worst.statistic:,.0f} on {law.worst.degrees}",
            "p of all": law.p,
            "law": "the same" if law.holds else "ANOTHER",
        }
        for engine, law in laws.items()
    )
    return table_of(rows, f"sampling with and without drafts, texts of {tokens} tokens")


def as_json(found: Found) -> list[dict[str, Any]]:
    """Every measurement, with the number of its tokens."""
    return [
        {
            **asdict(job),
            "way": str(way),
            "engine": way.engine,
            "gamma": way.gamma,
            "turns": [m.turn for m in own],
            "seconds": [m.seconds for m in own],
            "tokens": [sum(map(len, m.texts)) for m in own],
            "surplus": [m.surplus for m in own],
        }
        for job, ways in found.items()
        for way, own in ways.items()
    ]
