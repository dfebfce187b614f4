"""tandem up: the three services on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from tandem.failure import Failure, Misconfigured
from tandem.tools.cli.display.terminal import err, out
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.metrics_addresses import METRICS_ADDRESSES, variable_of_metrics
from tandem.tools.cli.options import DEFAULT_ADDRESS, HTTP_ADDRESS, RULES

if TYPE_CHECKING:
    from tandem.tools.local.stack import Stack

_MODELS = "Models"
_SPECULATION = "Speculation"
_RUNNING = "Running"
_WATCH_SECONDS = 0.2
_HTTP_VARIABLE = "TANDEM_ORCHESTRATOR_HTTP_LISTEN"

_Target = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|ID",
        envvar="TANDEM_TARGET_MODEL",
        help="Target checkpoint: directory or hub id. Default: the embedded demo pair.",
        rich_help_panel=_MODELS,
    ),
]
_Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|ID|none|@target",
        envvar="TANDEM_DRAFTER_MODEL",
        help="Drafter checkpoint with the target's tokenizer; none starts no drafter; @target"
        " drafts with a part of the target. Not needed with a recipe that has no model.",
        rich_help_panel=_MODELS,
    ),
]
_Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Device of both models: cpu, cuda, cuda:1.", rich_help_panel=_MODELS
    ),
]
_TargetDevice = Annotated[
    str | None, typer.Option(metavar="NAME", help="Device of the target.", rich_help_panel=_MODELS)
]
_DrafterDevice = Annotated[
    str | None, typer.Option(metavar="NAME", help="Device of the drafter.", rich_help_panel=_MODELS)
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="auto, float32, bfloat16 or float16. Default auto: the checkpoint's on a GPU; on a CPU"
        " float32 for the target, the fastest for the drafter.",
        rich_help_panel=_MODELS,
    ),
]
_MaxLength = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=2,
        help="Tokens a sequence may hold. Default: what each model can hold.",
        rich_help_panel=_MODELS,
    ),
]
# `UpCommand` puts the names there.
_RECIPES = "RECIPES"
_Recipe = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        envvar="TANDEM_DRAFTER_RECIPE",
        help=f"How to draft: {_RECIPES}, or a TOML file. Default: TANDEM_DRAFTER_METHOD, or model.",
        rich_help_panel=_SPECULATION,
    ),
]
_DraftsInside = Annotated[
    bool | None,
    typer.Option(
        help="The target drafts by the recipe in its own process; no drafter is started. Faster on"
        " one machine, and the default where both models are on one GPU and no TANDEM_DRAFTER_*"
        " variable is set.",
        show_default=False,
        rich_help_panel=_SPECULATION,
    ),
]
_Gamma = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Tokens to draft per round, at most 64. Default auto: chosen for each round.",
        rich_help_panel=_SPECULATION,
    ),
]
_Verifier = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"{RULES}. Default block.",
        rich_help_panel=_SPECULATION,
    ),
]
_DraftSupport = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Most tokens to keep of a drafted distribution; 0 keeps all.",
        rich_help_panel=_SPECULATION,
    ),
]
_Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="TANDEM_ORCHESTRATOR_LISTEN",
        help="Where clients connect.",
        rich_help_panel=_RUNNING,
    ),
]
_Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|none",
        help=f"Where OpenAI's HTTP API is served. Default {HTTP_ADDRESS}, or a free port where that"
        " is taken.",
        rich_help_panel=_RUNNING,
    ),
]
_TraceDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="Write each service's spans to DIR/<service>.jsonl.",
        rich_help_panel=_RUNNING,
    ),
]
_LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="Write each service's log to DIR/<service>.log.",
        rich_help_panel=_RUNNING,
    ),
]
_DrainSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="How long running texts may take to finish. Default 30.",
        rich_help_panel=_RUNNING,
    ),
]
_Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the services' logs.", rich_help_panel=_RUNNING),
]


class UpCommand(TyperCommand):
    """Imports the table of recipes only to show its help: other commands do without it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See typer."""
        from tandem.drafting.methods import METHODS

        for option in self.params:
            if isinstance(option, TyperOption) and option.help:
                option.help = option.help.replace(_RECIPES, ", ".join(METHODS))
        super().format_help(ctx, formatter)


def up(
    target: _Target = None,
    drafter: _Drafter = None,
    device: _Device = None,
    target_device: _TargetDevice = None,
    drafter_device: _DrafterDevice = None,
    dtype: _Dtype = None,
    max_length: _MaxLength = None,
    recipe: _Recipe = None,
    drafts_inside: _DraftsInside = None,
    gamma: _Gamma = None,
    verifier: _Verifier = None,
    draft_support: _DraftSupport = None,
    listen: _Listen = DEFAULT_ADDRESS,
    http: _Http = None,
    trace_dir: _TraceDir = None,
    log_dir: _LogDir = None,
    drain_seconds: _DrainSeconds = None,
    verbose: _Verbose = False,
) -> None:
    """Start drafter, target and orchestrator, and serve until Ctrl-C.

    Ctrl-C or SIGTERM lets running texts finish; a second Ctrl-C does not.
    TANDEM_DRAFTER_*, TANDEM_TARGET_* and TANDEM_ORCHESTRATOR_* variables set
    more; options override them. This command itself sets LOG_FORMAT and the
    orchestrator's DRAFTERS and TARGETS.
    """
    from tandem.drafting.drafter import OF_TARGET
    from tandem.tools.local.draft_length import allow_drafts
    from tandem.tools.local.endpoints import free_or_other
    from tandem.tools.local.pair import Pair
    from tandem.tools.local.stack import Stack, StackSettings

    with reported():
        if drafter == OF_TARGET and drafts_inside is False:
            raise Misconfigured(
                "--no-drafts-inside, and --drafter @target drafts inside: name a checkpoint"
            )
        pair = Pair(
            target=target,
            drafter=drafter,
            target_device=target_device or device,
            drafter_device=drafter_device or device,
            dtype=dtype,
            max_length=max_length,
            draft_support=draft_support,
            recipe=recipe,
            inside=bool(drafts_inside),
        )
        # A drafter's settings say more than a target's own drafts follow.
        free = not any(name.startswith("TANDEM_DRAFTER_") for name in os.environ)
        if drafts_inside is None and free and not pair.inside and pair.shares_a_gpu:
            pair = replace(pair, inside=True)
            err.print(
                "Both models are on one GPU: the target drafts in its own process, since the"
                " processes would take turns on it. --no-drafts-inside starts a drafter.",
                style="dim",
            )
        services = pair.settings()
        orchestrator: dict[str, Any] = {
            "LISTEN": listen,
            "HTTP_LISTEN": _http_listen(http, listen),
            "GAMMA": gamma,
            "VERIFIER": verifier,
        }
        services["orchestrator"] = {
            name: str(value) for name, value in orchestrator.items() if value is not None
        }
        allow_drafts(services)
        for name, settings in services.items():
            if variable_of_metrics(name) not in os.environ:
                taken = [address for address in (listen, orchestrator["HTTP_LISTEN"]) if address]
                settings["METRICS_LISTEN"] = free_or_other(METRICS_ADDRESSES[name], taken)
            if trace_dir is not None:
                settings["TRACE_FILE"] = str(trace_dir / f"{name}.jsonl")
            if drain_seconds is not None:
                settings["DRAIN_SECONDS"] = f"{drain_seconds:g}"
        echo = (lambda line: err.out(line, style="dim", highlight=False)) if verbose else None
        _serve(Stack(StackSettings(services, log_dir, echo, inside=pair.inside)))


def _http_listen(asked: str | None, listen: str) -> str | None:
    """Where HTTP is served; None for nowhere, or where the environment says.

    Args:
        asked: the option.
        listen: the address of gRPC.

    Raises:
        Misconfigured: the address is taken.
    """
    from tandem.tools.local.endpoints import free_or_other, require_free

    if asked == "none":
        os.environ.pop(_HTTP_VARIABLE, None)
        return None
    if asked is not None:
        require_free(asked, "--http")
        return asked
    return None if _HTTP_VARIABLE in os.environ else free_or_other(HTTP_ADDRESS, [listen])


def _serve(stack: Stack) -> None:
    """Run a stack from its start to its end."""
    from tandem.tools.local.stack import Interrupted

    with _stop_signals() as stopping:
        try:
            with err.status("starting") as status:
                stack.start(stopping, status.update)
            _announce(stack)
            while not stopping.wait(_WATCH_SECONDS):
                stack.require_alive()
            err.out("draining; Ctrl-C again to stop at once", style="dim", highlight=False)
            codes = stack.drain()
        except Interrupted:
            return
        finally:
            stack.kill()
    if failed := {name: code for name, code in codes.items() if code}:
        raise Failure(f"not every service ended well; exit codes: {failed}")
    err.out("stopped", style="dim", highlight=False)


@contextmanager
def _stop_signals() -> Iterator[Event]:
    """An event that the first signal sets. A second Ctrl-C interrupts as usual."""
    stopping = Event()

    def stop(number: int, frame: object) -> None:
        stopping.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(stack: Stack) -> None:
    from tandem.tools.cli.display.recipe import shown
    from tandem.tools.local.readiness import drafts_by

    addresses = stack.addresses
    drafting = "drafter" if "drafter" in addresses else "target"
    recipe = shown(drafts_by(drafting, stack.endpoint(drafting)))
    none = "none: the target drafts" if recipe else "none: decoding plainly"
    for name in ("orchestrator", "target", "drafter"):
        out.print(f"[bold]{name:<12}[/] {addresses.get(name, none)}")
    if recipe or "drafter" in addresses:
        out.print(f"[bold]{'recipe':<12}[/] {recipe or 'unknown'}", soft_wrap=True)
    metrics = stack.further_addresses("METRICS_LISTEN").values()
    usual = set(metrics) <= set(METRICS_ADDRESSES.values())
    out.print(f"[bold]{'metrics':<12}[/] {' '.join(metrics)}", soft_wrap=True)
    http = stack.further_addresses("HTTP_LISTEN").get("orchestrator")
    if http:
        secure = stack.endpoint("orchestrator").tls is not None
        page = f"http{'s' if secure else ''}://{http}"
        base = f"{page}/v1"
        out.print(f"[bold]{'HTTP':<12}[/] {base}")
        out.print(f"[bold]{'page':<12}[/] {page}")
    address = addresses["orchestrator"]
    option = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    out.print(f"\nready; try [bold]tandem generate{option} 'import '[/] (Ctrl-C drains and stops)")
    out.print(f"watch [bold]tandem top{'' if usual else ' ' + ' '.join(metrics)}[/]")
    if http:
        body = '{"prompt": "import ", "max_tokens": 40}'
        out.print(f"call  [bold]curl {base}/completions -d '{body}'[/]", soft_wrap=True)
    out.file.flush()
