"""How hidden states are sent."""

from __future__ import annotations

from enum import Enum


class HiddenDtype(Enum):
    """A dtype in which hidden states leave the device, and travel."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def bytes(self) -> int:
        """Of a number."""
        return 2 if self is HiddenDtype.BFLOAT16 else 4
