"""Models that use a group of layers several times (SPEED, Hooper et al., arXiv 2310.12072)."""

from __future__ import annotations

# The key of a configuration: how often the stored layers are used, one cycle behind the other.
CYCLES = "cycles"
