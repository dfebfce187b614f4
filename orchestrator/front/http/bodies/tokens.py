"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from orchestrator.front.http.bodies.fields import Body, Ids


class TokenizeBody(Body):
    """The body of /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids
