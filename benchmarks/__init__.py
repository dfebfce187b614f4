"""Figures that anyone can measure again: each run prints a table and writes JSON."""

from tandem.inference.threads import spin_less

# Models run in these processes too, beside services that want the cores.
spin_less()
