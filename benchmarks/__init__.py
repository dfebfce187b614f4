"""Reproducible measurements: each run prints a table and writes JSON."""

from tandem.inference.threads import spin_less

# Models run in these processes too, next to services that need the cores.
spin_less()
