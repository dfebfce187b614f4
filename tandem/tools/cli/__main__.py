"""python -m tandem.tools.cli"""

from __future__ import annotations

from tandem.tools.cli.main import app

app()
