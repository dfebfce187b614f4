"""tandem info: what an orchestrator serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.lengths import ANY_LENGTH
from tandem.tools.cli.display.recipe import shown
from tandem.tools.cli.display.terminal import out
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.options import DEFAULT_ADDRESS, AddressOption
from tandem.tools.cli.security import Security, secured

if TYPE_CHECKING:
    from rich.table import Table

    from tandem.common.v1 import common_pb2
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb


@secured
def info(
    security: Security,
    address: AddressOption = DEFAULT_ADDRESS,
) -> None:
    """Show what an orchestrator serves: its models, verifiers and defaults."""
    from tandem.client.connection import Connection

    with reported(), Connection(security.at(address)) as client:
        reply = client.info()
        out.print(_models(reply))
        nodes = ""
        if reply.max_nodes:
            nodes = f"nodes: 1 to {reply.max_nodes} ({_default(reply, 'nodes')})\n"
        out.print(
            f"verifiers: {', '.join(reply.verifiers)} (default {reply.default_verifier})\n"
            f"gamma: 0 to {reply.max_gamma} ({_default(reply, 'gamma')})\n"
            f"{nodes}"
            f"texts being generated: {reply.active_requests}"
        )


def _default(reply: pb.GetModelInfoResponse, name: str) -> str:
    """The default of a size: a number, or "auto" if it is chosen round by round."""
    given = reply.HasField(f"default_{name}")  # type: ignore[arg-type]
    return f"default {getattr(reply, f'default_{name}') if given else 'auto'}"


def _models(reply: pb.GetModelInfoResponse) -> Table:
    from rich.table import Table

    table = Table("", "target")
    columns = [_rows(reply.target)]
    if reply.HasField("drafter"):
        table.add_column("drafter")
        columns.append(_rows(reply.drafter) if reply.drafter.parameters else _alone(reply.drafter))
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    recipes = "\n".join(map(shown, reply.drafter_recipes)) or "unknown"
    if reply.drafts_by_target:
        table.add_row("drafts inside", recipes)
    if reply.HasField("drafter"):
        table.add_row("recipe", "", recipes)
    if reply.drafter.weights_version:
        table.add_row("weights", "", f"version {reply.drafter.weights_version:,}")
    return table


def _rows(model: common_pb2.ModelInfo) -> dict[str, str]:
    return {
        "model": model.model,
        "parameters": f"{model.parameters:,}",
        "vocabulary": f"{model.vocab_size:,}",
        "tokenizer": model.tokenizer_fingerprint[:12] or "none: prompts are token ids",
        "end-of-text ids": ", ".join(map(str, model.eos_token_ids)) or "none",
        "tokens a sequence": "any" if model.max_length == ANY_LENGTH else f"{model.max_length:,}",
        "sequences at once": f"{model.max_sequences:,}",
        "longest draft": f"{model.max_gamma}",
        "runs on": f"{model.device}, {model.dtype}" + (f", by {model.engine}" * bool(model.engine)),
    }


def _alone(drafter: common_pb2.ModelInfo) -> dict[str, str]:
    """The rows of a drafter without a model, which takes and drafts any id."""
    return {
        **_rows(drafter),
        "model": "none",
        "parameters": "none",
        "vocabulary": "the target's",
        "tokenizer": "none: it drafts token ids",
        "runs on": drafter.device,
    }
