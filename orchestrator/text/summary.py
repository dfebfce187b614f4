"""What happened to a text, once it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from orchestrator.text.ledger import Ledger
from orchestrator.text.tally import Tally
from orchestrator.text.values import Generation


class FinishReason(Enum):
    """Why a text ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a text.

    Attributes:
        generation: with every value that was in effect.
        finish_reason: why it ended.
        stop_string: that came, if one did.
        tally: counts.
        ledger: times.
        drafter_lost: the drafter failed on the way.
    """

    generation: Generation
    finish_reason: FinishReason
    stop_string: str
    tally: Tally
    ledger: Ledger
    drafter_lost: bool
