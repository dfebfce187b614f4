"""What fields of several bodies have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, model_validator


class Body(BaseModel):
    """Of a request. Unknown fields are kept; `reading` refuses them or tells the log of them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, hide_input_in_errors=True)


class Exact(BaseModel):
    """An object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_null(cls, fields: Any) -> Any:
        """Clients send null for what was not set. Unknown names stay, and are refused."""
        if isinstance(fields, dict):
            return {
                name: value
                for name, value in fields.items()
                if value is not None or name not in cls.model_fields
            }
        return fields


def ids(value: Any) -> list[int]:
    """Token ids; a million take a tenth of a second."""
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError("it must be a list of token ids")
    if value and not 0 <= min(value) <= max(value) < 2**32:
        raise ValueError("a token id is out of range")
    return value


Ids = Annotated[list[int], PlainValidator(ids)]
