"""A text on its way to a terminal or a pipe."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterable

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.cli.display.terminal import err, out, write_exactly

# Superscripts, for how many siblings a token of a tree beat.
_SMALL = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_STYLES = {
    pb.TOKEN_ORIGIN_ACCEPTED: "green",
    pb.TOKEN_ORIGIN_CORRECTION: "bold yellow",
    pb.TOKEN_ORIGIN_BONUS: "bold blue",
}


def render(
    prompt: str, replies: Iterable[pb.GenerateResponse], has_text: bool, *, legend: bool = True
) -> pb.Summary:
    """Print a text as it arrives, then a line that sums it up.

    Args:
        prompt: shown before the text on a terminal.
        replies: the stream.
        has_text: False prints token ids, for a target without a tokenizer.
        legend: what the colours mean is printed first, on a terminal.

    Returns:
        The last message.
    """
    started = time.perf_counter()
    summary = pb.Summary()
    if out.is_terminal and legend:
        _print_legend()
    if out.is_terminal:
        out.out(_harmless(prompt), style="dim", end="", highlight=False)
    last = "\n"
    try:
        for reply in replies:
            for token in reply.round.tokens:
                text = token.text if has_text else f"{token.id} "
                _print_token(text, token.origin)
                if token.siblings and out.is_terminal:
                    beaten = str(token.siblings).translate(_SMALL)
                    out.out(beaten, style="dim", end="", highlight=False)
                last = (last + text)[-1]
            if reply.summary.tail:
                write_exactly(_harmless(reply.summary.tail))
                last = reply.summary.tail[-1]
            summary.MergeFrom(reply.summary)
    finally:
        if last != "\n":
            write_exactly("\n")
    err.out(summary_line(summary, time.perf_counter() - started), style="dim", highlight=False)
    return summary


def summary_line(summary: pb.Summary, wall_s: float) -> str:
    """The summary in one line."""
    parts = [
        f"{summary.new_tokens} tokens in {wall_s:.2f} s"
        f" ({summary.new_tokens / max(wall_s, 1e-9):.1f} tokens/s)",
        f"{summary.rounds} target calls",
    ]
    if summary.drafted_tokens:
        parts.append(f"acceptance {summary.acceptance_rate:.2f}")
        parts.append(f"block efficiency {summary.block_efficiency:.2f}")
    if len(summary.accepted_per_rank) > 1:
        parts.append(f"kept by rank {'/'.join(map(str, summary.accepted_per_rank))}")
    if summary.effective.speculation.verifier.startswith("lossy_"):
        parts.append(f"{summary.effective.speculation.verifier}: not the target's law")
    if summary.drafter_lost:
        parts.append("drafter lost on the way")
    reason = pb.FinishReason.Name(summary.finish_reason).removeprefix("FINISH_REASON_")
    parts += [f"ended by {reason.lower()}", f"seed {summary.effective.sampling.seed}"]
    return " · ".join(parts)


def _print_legend() -> None:
    names = {
        pb.TOKEN_ORIGIN_ACCEPTED: "drafted and accepted",
        pb.TOKEN_ORIGIN_CORRECTION: "the target's correction",
        pb.TOKEN_ORIGIN_BONUS: "the target's bonus",
    }
    legend = "  ".join(f"[{_STYLES[origin]}]■ {name}[/]" for origin, name in names.items())
    err.print(f"{legend}  [dim]■ prompt[/]\n")


def _print_token(text: str, origin: pb.TokenOrigin.ValueType) -> None:
    if not out.is_terminal:
        write_exactly(text)
        return
    out.out(_harmless(text), style=_STYLES.get(origin), end="", highlight=False)
    out.file.flush()


def _harmless(text: str) -> str:
    """Text without the control characters that could command a terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(character) == "Cc" and character not in "\n\t"
        else character
        for character in text
    )
