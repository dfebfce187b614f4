"""The page at `/`: a text as it streams, in a browser. It loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers: only its own script runs, and it calls only this service."""
    content = _FILE.read_bytes()
    (script,) = re.findall(rb"<script>(.*?)</script>", content, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        " img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    return content, {
        "content-type": "text/html; charset=utf-8",
        "content-length": str(len(content)),
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
