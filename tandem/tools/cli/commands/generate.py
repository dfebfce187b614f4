"""tandem generate: a text, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.failure import Misconfigured
from tandem.tools.cli.display.terminal import err, write_exactly
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.options import DEFAULT_ADDRESS, AddressesOption
from tandem.tools.cli.security import Security, secured

if TYPE_CHECKING:
    from tandem.client.blocking import Client
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

_SAMPLING = "Sampling"
_STOPPING = "Stopping"
_SPECULATION = "Speculation"

_Prompt = Annotated[
    str | None, typer.Argument(help="Text to continue; - reads it from standard input.")
]
_TokenIds = Annotated[
    str | None,
    typer.Option(metavar="ID,ID,...", help="Continue these token ids instead of a text."),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead: a CompleteResponse.")
]
_Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0, help="Give up after this long.")
]
_ResumeSeconds = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="After losing the orchestrator, continue the text if one answers within this time.",
    ),
]
_Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="0 takes the most likely token. Default 1.", rich_help_panel=_SAMPLING
    ),
]
_TopK = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        min=0,
        help="Keep the K most likely tokens; 0 keeps all.",
        rich_help_panel=_SAMPLING,
    ),
]
_TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Keep the most likely tokens up to this mass.", rich_help_panel=_SAMPLING
    ),
]
_MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Drop tokens less likely than this times the most likely one.",
        rich_help_panel=_SAMPLING,
    ),
]
_Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="With --gamma, the same seed gives the same text. Default: random.",
        rich_help_panel=_SAMPLING,
    ),
]
_MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="N",
        min=0,
        help="Most tokens of the text. Default 256.",
        rich_help_panel=_STOPPING,
    ),
]
_Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End before this text. Repeatable.", rich_help_panel=_STOPPING
    ),
]
_StopTokenId = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID", min=0, help="End after this token. Repeatable.", rich_help_panel=_STOPPING
    ),
]
_IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Continue past the model's end of text.", rich_help_panel=_STOPPING
    ),
]
_Verifier = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="block, token, greedy_block, spectr or gbv.",
        rich_help_panel=_SPECULATION,
    ),
]
_VerifierOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the verifier, such as epsilon=0.05 of lossy_typical. Repeatable.",
        rich_help_panel=_SPECULATION,
    ),
]
_Gamma = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Tokens to draft per round; 0 decodes plainly. Default: the orchestrator's.",
        rich_help_panel=_SPECULATION,
    ),
]
_Nodes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens to draft per round, where drafts are trees; else the request is refused."
        " Default: the orchestrator's.",
        rich_help_panel=_SPECULATION,
    ),
]


@secured
def generate(
    security: Security,
    prompt: _Prompt = None,
    address: AddressesOption = DEFAULT_ADDRESS,
    token_ids: _TokenIds = None,
    json: _Json = False,
    timeout: _Timeout = None,
    resume_seconds: _ResumeSeconds = 30.0,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    min_p: _MinP = None,
    seed: _Seed = None,
    max_new_tokens: _MaxNewTokens = None,
    stop: _Stop = None,
    stop_token_id: _StopTokenId = None,
    ignore_eos: _IgnoreEos = False,
    verifier: _Verifier = None,
    verifier_option: _VerifierOption = None,
    gamma: _Gamma = None,
    nodes: _Nodes = None,
) -> None:
    """Continue a prompt, and mark the accepted drafted tokens while the text streams.

    On a terminal, colours distinguish accepted tokens from the target's own;
    a pipe gets the plain text.
    """
    from tandem.client.blocking import Client
    from tandem.common.v1 import common_pb2
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

    text, ids = _prompt(prompt, token_ids)
    with reported():
        places = [security.at(one) for one in address.split(",")]
        try:
            generation = pb.Generation(
                prompt=text,
                prompt_token_ids=ids,
                sampling=common_pb2.Sampling(
                    temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
                ),
                stopping=pb.Stopping(
                    max_new_tokens=max_new_tokens,
                    ignore_eos=ignore_eos,
                    stop_token_ids=stop_token_id or (),
                    stop_strings=stop or (),
                ),
                speculation=pb.Speculation(
                    verifier=verifier,
                    gamma=gamma,
                    max_nodes=nodes,
                    verifier_options=_options(verifier_option or ()),
                ),
            )
        except ValueError as error:
            raise Misconfigured(f"a number is out of range: {error}") from None
        with Client.of(places, resume_seconds, _tell) as client:
            _run(client, generation, timeout, json)


def _prompt(prompt: str | None, token_ids: str | None) -> tuple[str | None, list[int]]:
    """The prompt in one of its two forms.

    Raises:
        typer.BadParameter: both or neither is given, or an id is not a number.
    """
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give either PROMPT or --token-ids")
    if token_ids is None:
        return (sys.stdin.read() if prompt == "-" else prompt), []
    try:
        return None, [int(part) for part in token_ids.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--token-ids: {token_ids!r} is no list of numbers") from None


def _options(given: Sequence[str]) -> dict[str, float]:
    """Options of a verifier.

    Raises:
        typer.BadParameter: one is not NAME=VALUE.
    """
    found = {}
    for each in given:
        name, _, value = each.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"--verifier-option: {each!r} is no NAME=NUMBER") from None
    return found


def _tell(sentence: str) -> None:
    err.out(f"tandem: {sentence}", style="dim", highlight=False)


def _run(client: Client, generation: pb.Generation, timeout_s: float | None, json: bool) -> None:
    from google.protobuf.json_format import MessageToJson

    from tandem.tools.cli.display.text import render

    if json:
        text = MessageToJson(
            _whole(client.events(generation, timeout_s)),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
            ensure_ascii=False,
        )
        write_exactly(f"{text}\n")
        return
    has_text = generation.HasField("prompt") or client.info().target.tokenizer_fingerprint
    render(generation.prompt, client.events(generation, timeout_s), bool(has_text))


def _whole(events: Iterable[pb.GenerateResponse]) -> pb.CompleteResponse:
    """A text's messages as one answer."""
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

    reply = pb.CompleteResponse()
    texts: list[str] = []
    for event in events:
        if event.HasField("summary"):
            reply.summary.CopyFrom(event.summary)
            continue
        tokens = event.round.tokens
        texts.extend(token.text for token in tokens)
        reply.token_ids.extend(token.id for token in tokens)
        reply.origins.extend(token.origin for token in tokens)
    reply.text = "".join(texts)
    return reply
