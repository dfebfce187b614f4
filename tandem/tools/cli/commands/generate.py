"""tandem generate: a text, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.failure import Misconfigured
from tandem.tools.cli.display.terminal import err, write_exactly
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.options import DEFAULT_ADDRESS, AddressesOption
from tandem.tools.cli.security import Security, secured
from tandem.tools.cli.text_options import (
    BadWordOption,
    ChoiceOption,
    FrequencyPenaltyOption,
    GammaOption,
    GrammarOption,
    IgnoreEosOption,
    JsonSchemaOption,
    LogitBiasOption,
    MaxNewTokensOption,
    MinPOption,
    MinTokensOption,
    NodesOption,
    NoLearnOption,
    PresencePenaltyOption,
    RegexOption,
    RepetitionPenaltyOption,
    SeedOption,
    StopOption,
    StopTokenIdOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    VerifierOption,
    VerifierOptionOption,
    bias_of,
    numbers_of,
    schema_of,
)

if TYPE_CHECKING:
    from tandem.client.blocking import Client
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

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
_LogProbs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        max=20,
        help="With --json: log probabilities of the tokens, and of the N likeliest at each place.",
    ),
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


@secured
def generate(
    security: Security,
    prompt: _Prompt = None,
    address: AddressesOption = DEFAULT_ADDRESS,
    token_ids: _TokenIds = None,
    json: _Json = False,
    log_probs: _LogProbs = None,
    timeout: _Timeout = None,
    resume_seconds: _ResumeSeconds = 30.0,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    stop: StopOption = None,
    stop_token_id: StopTokenIdOption = None,
    ignore_eos: IgnoreEosOption = False,
    min_tokens: MinTokensOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    logit_bias: LogitBiasOption = None,
    bad_word: BadWordOption = None,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    verifier: VerifierOption = None,
    verifier_option: VerifierOptionOption = None,
    gamma: GammaOption = None,
    nodes: NodesOption = None,
    no_learn: NoLearnOption = False,
) -> None:
    """Continue a prompt, and mark the accepted drafted tokens while the text streams.

    On a terminal, colours distinguish accepted tokens from the target's own;
    a pipe gets the plain text.
    """
    from tandem.client.blocking import Client
    from tandem.client.errors import Refused
    from tandem.client.options import generation_of

    text, ids = _prompt(prompt, token_ids)
    with reported():
        places = [security.at(one) for one in address.split(",")]
        try:
            generation = generation_of(
                ids if text is None else text,
                {
                    "temperature": temperature,
                    "top_k": top_k,
                    "top_p": top_p,
                    "min_p": min_p,
                    "seed": seed,
                    "max_new_tokens": max_new_tokens,
                    "stop": stop,
                    "stop_token_ids": stop_token_id,
                    "ignore_eos": ignore_eos,
                    "min_tokens": min_tokens,
                    "frequency_penalty": frequency_penalty,
                    "presence_penalty": presence_penalty,
                    "repetition_penalty": repetition_penalty,
                    "logit_bias": bias_of(logit_bias or ()),
                    "bad_words": bad_word,
                    "json_schema": schema_of(json_schema),
                    "regex": regex,
                    "choice": choice,
                    "grammar": None if grammar is None else grammar.read_text(),
                    "log_probs": log_probs,
                    "gamma": gamma,
                    "max_nodes": nodes,
                    "verifier": verifier,
                    "verifier_options": numbers_of(verifier_option or (), "--verifier-option"),
                    "learn": False if no_learn else None,
                },
            )
        except Refused as refused:
            raise Misconfigured(str(refused).partition(": ")[2]) from None
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
            texts.append(event.summary.tail)
            continue
        tokens = event.round.tokens
        texts.extend(token.text for token in tokens)
        reply.token_ids.extend(token.id for token in tokens)
        reply.origins.extend(token.origin for token in tokens)
        reply.log_probs.extend(token.log_prob for token in tokens if token.HasField("log_prob"))
    reply.text = "".join(texts)
    return reply
