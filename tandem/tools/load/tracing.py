"""Who is traced: the client says so in the W3C header of its call."""

from __future__ import annotations

import secrets


def sampled(wanted: bool) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that has the services record its spans, or not to."""
    return (
        ("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(wanted):02x}"),
    )
