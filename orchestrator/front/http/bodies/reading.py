"""A body is read: its JSON, its fields, and what is not known of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from orchestrator.front.http.bodies.fields import Body
from orchestrator.front.http.bodies.generating import Generating
from orchestrator.front.http.errors import InHttpWords
from tandem.errors import InvalidRequest

_log = structlog.get_logger(__name__)

# Of fields that are told in the log, each once.
_MOST_UNKNOWN = 64
# Characters of such a field's name.
_MOST_NAME = 64
_unknown: set[str] = set()

# Of fields with several kinds, pydantic's faults speak of each kind.
_UNIONS = {
    "stop": "a string, or a list of strings",
    "tool_choice": 'a string: "auto" or "none"',
}

B = TypeVar("B", bound=Body)


def read(kind: type[B], body: bytes, *, unknown: bool = False) -> B:
    """A body.

    Args:
        kind: of it.
        body: as it came.
        unknown: whether unknown fields are let pass, without an effect.

    Raises:
        InvalidRequest: it is not what it should be; the sentence begins with the field.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else "no valid JSON"
        raise InvalidRequest(f"body: {why}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body: it must be a JSON object")
    if b"\\ud" in body.lower():
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidRequest("body: it has half a character (a lone surrogate)") from None
    try:
        # Clients send null for what was not set.
        found = kind.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise InvalidRequest(_sentence(error)) from None
    extra = dict(found.model_extra or {})
    if isinstance(found, Generating):
        for name, nothing in found.unsupported.items():
            # True is 1 in Python, and asks for something.
            if name in extra and not any(
                extra[name] == value and isinstance(extra[name], bool) == isinstance(value, bool)
                for value in nothing
            ):
                raise InvalidRequest(f"{name} is not supported here; leave it out")
        extra = {name: 0 for name in extra if name not in {*found.unsupported, *found.ignored}}
    if unknown:
        _tell(kind.__name__, extra)
    elif extra:
        name = min(extra)
        # A name of gRPC's fields is the caller's here.
        raise InHttpWords(_unknown_field(kind, name), {name: name})
    return found


def _unknown_field(kind: type[Body], name: str) -> str:
    """The sentence about a field that is not known, with the one that was probably meant."""
    own = kind.renamed.get(name) if issubclass(kind, Generating) else None
    like = [own] if own else get_close_matches(name, kind.model_fields, 1)
    hint = f"did you mean {like[0]}?" if like else "leave it out"
    return (
        f"{name[:_MOST_NAME]}: there is no such field here; {hint}"
        " (TANDEM_ORCHESTRATOR_UNKNOWN_FIELDS=ignore lets unknown fields pass)"
    )


def _sentence(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    first, *rest = fault["loc"] or ("body",)
    if first in _UNIONS:
        return f"{first}: it must be {_UNIONS[first]}"
    where = ".".join(map(str, (first, *rest)))
    said = str(fault["msg"]).removeprefix("Value error, ")
    return f"{where}: {said[:1].lower()}{said[1:]}"


def _tell(kind: str, names: Mapping[str, Any]) -> None:
    for name in names:
        key = f"{kind}.{name[:_MOST_NAME]}"
        if key not in _unknown and len(_unknown) < _MOST_UNKNOWN:
            _unknown.add(key)
            _log.warning("a request has a field that is not known here", field=key)
