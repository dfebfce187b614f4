"""How much a load may ask for."""

from __future__ import annotations

# All texts of a run are known beforehand and their timelines kept, some 10 KB each.
MOST_TEXTS = 50_000
# Texts of an open loop that may be on their way at once: eight services' worth of places, and far
# below what a client's memory and ports allow.
MAX_IN_FLIGHT = 2048
# What may be asked for instead, also of clients: one event loop reads all of their streams, and
# with more of them it would measure itself.
MOST_IN_FLIGHT = 16_384
