"""The table of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from rich.table import Table

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.cli.comparison import METHODS, TEMPERATURES, TurnResult
from tandem.tools.cli.display.terminal import out
from tandem.tools.load.method import PLAIN, Method

_COLUMNS = (
    "temper-\nature",
    "verifier",
    "gamma",
    "tokens/s",
    "to plain",
    "target\ncalls",
    "accep-\ntance",
    "block\nefficiency",
    "prefill",
    "draft\nwait",
    "verify\nwait",
    "all\nelse",
)


def print_report(samples: Sequence[TurnResult]) -> None:
    """Print the table, and the time of a round outside the models."""
    table = Table(*_COLUMNS, title="Plain and speculative decoding of the same prompts")
    for column in table.columns[2:]:
        column.justify = "right"
    for temperature in TEMPERATURES:
        group = [sample for sample in samples if sample.turn.temperature == temperature]
        for method in METHODS:
            table.add_row(f"{temperature:g}", str(method), *_cells(group, method))
        table.add_section()
    out.print(table)
    texts = len(samples) // (len(TEMPERATURES) * len(METHODS))
    out.print(
        f"Each line is {texts} texts. tokens/s and its ratio to plain decoding of the same text are"
        " medians, target calls a mean.\nThe last four columns are shares of the requests' wall"
        f" time. Outside its forward passes a round takes {_beside_ms(samples):.2f} ms (p50)."
    )


def _cells(group: Sequence[TurnResult], method: Method) -> list[str]:
    """A method's figures at one temperature."""
    mine = [sample for sample in group if sample.turn.method == method]
    plain = [sample for sample in group if sample.turn.method == PLAIN]
    ratios = [_speed(one) / _speed(base) for one, base in zip(mine, plain, strict=True)]
    summaries = [sample.summary for sample in mine]
    drafted = sum(summary.drafted_tokens for summary in summaries)
    accepted = sum(summary.accepted_tokens for summary in summaries)
    rounds = sum(1 for summary in summaries for gamma in summary.gammas if gamma)
    return [
        f"{method.gamma}",
        f"{median(map(_speed, mine)):.1f}",
        f"{median(ratios):.2f}x",
        f"{mean(summary.rounds for summary in summaries):.1f}",
        f"{accepted / drafted:.2f}" if drafted else "-",
        f"{accepted / rounds + 1:.2f}" if rounds else "-",
        *_shares([summary.stages for summary in summaries]),
    ]


def _speed(sample: TurnResult) -> float:
    """Tokens a second."""
    return len(sample.token_ids) / sample.wall_s


def _shares(stages: Sequence[pb.Stages]) -> list[str]:
    """Shares of the wall time: prefill, draft wait, verify wait, all else."""
    total = sum(stage.total_ns for stage in stages)
    waits = [
        sum(stage.open_wait_ns for stage in stages),
        sum(stage.draft_wait_ns for stage in stages),
        sum(stage.verify_wait_ns for stage in stages),
    ]
    return [f"{part / total:.0%}" for part in (*waits, total - sum(waits))]


def _beside_ms(samples: Sequence[TurnResult]) -> float:
    """Median of a drafted round's time minus its forward passes, milliseconds."""
    beside = [
        wall - model
        for sample in samples
        for wall, model in zip(
            sample.summary.stages.round_wall_ns, sample.summary.stages.round_model_ns, strict=True
        )
    ]
    return median(beside) / 1e6 if beside else 0.0
