"""Options of a text, for the commands that generate one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tandem.tools.cli.options import RULES

_SAMPLING = "Sampling"
_STOPPING = "Stopping"
_SHAPING = "Shaping"
_SPECULATION = "Speculation"

TemperatureOption = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="0 takes the most likely token. Default 1.", rich_help_panel=_SAMPLING
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        min=0,
        help="Keep the K most likely tokens; 0 keeps all.",
        rich_help_panel=_SAMPLING,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Keep the most likely tokens up to this mass.", rich_help_panel=_SAMPLING
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Drop tokens less likely than this times the most likely one.",
        rich_help_panel=_SAMPLING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="With --gamma, the same seed gives the same text. Default: random.",
        rich_help_panel=_SAMPLING,
    ),
]
MaxNewTokensOption = Annotated[
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
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End before this text. Repeatable.", rich_help_panel=_STOPPING
    ),
]
StopTokenIdOption = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID", min=0, help="End after this token. Repeatable.", rich_help_panel=_STOPPING
    ),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Continue past the model's end of text.", rich_help_panel=_STOPPING
    ),
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"{RULES}.",
        rich_help_panel=_SPECULATION,
    ),
]
VerifierOptionOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the verifier, such as epsilon=0.05 of lossy_typical. Repeatable.",
        rich_help_panel=_SPECULATION,
    ),
]
GammaOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Tokens to draft per round; 0 decodes plainly. Default: the orchestrator's.",
        rich_help_panel=_SPECULATION,
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens to draft per round, where drafts are trees; else the request is refused."
        " Default: the orchestrator's.",
        rich_help_panel=_SPECULATION,
    ),
]
NoLearnOption = Annotated[
    bool,
    typer.Option(
        "--no-learn",
        help="Drafters that learn while they serve keep nothing of this text.",
        rich_help_panel=_SPECULATION,
    ),
]

FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Subtract this from a token's logit for each time that it was generated; -2 to 2.",
        rich_help_panel=_SHAPING,
    ),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Subtract this from the logits of generated tokens; -2 to 2.",
        rich_help_panel=_SHAPING,
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Divide the logits of tokens of the prompt and the text by this.",
        rich_help_panel=_SHAPING,
    ),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=X", help="Add to a token's logit. Repeatable.", rich_help_panel=_SHAPING
    ),
]
BadWordOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="A text that may not come. Repeatable.", rich_help_panel=_SHAPING
    ),
]
MinTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="No end of the text before N tokens.", rich_help_panel=_SHAPING
    ),
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|JSON", help="The text is JSON of this schema.", rich_help_panel=_SHAPING
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX", help="The text matches this expression.", rich_help_panel=_SHAPING
    ),
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="The text is one of these. Repeatable.", rich_help_panel=_SHAPING
    ),
]
GrammarOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="The text keeps to this grammar (Lark, as llguidance reads it).",
        rich_help_panel=_SHAPING,
    ),
]


def numbers_of(given: Sequence[str], option: str) -> dict[str, float]:
    """Pairs of a name and a number.

    Raises:
        typer.BadParameter: one is not NAME=NUMBER.
    """
    found = {}
    for each in given:
        name, _, value = each.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{option}: {each!r} is no NAME=NUMBER") from None
    return found


def bias_of(given: Sequence[str]) -> dict[int, float]:
    """What is added to the logits of token ids.

    Raises:
        typer.BadParameter: one is not ID=NUMBER.
    """
    pairs = numbers_of(given, "--logit-bias")
    if wrong := next((name for name in pairs if not name.isdecimal()), None):
        raise typer.BadParameter(f"--logit-bias: {wrong!r} is no token id")
    return {int(name): value for name, value in pairs.items()}


def schema_of(given: str | None) -> str | None:
    """A schema, or that of a file.

    Raises:
        typer.BadParameter: it is neither.
    """
    if given is None:
        return None
    try:
        json.loads(given)
    except ValueError:
        file = Path(given)
        if not file.is_file():
            raise typer.BadParameter(f"--json-schema: {given!r} is no JSON and no file") from None
        return file.read_text()
    return given
