"""python -m tandem.cli"""

from __future__ import annotations

from tandem.cli.main import app

app()
