"""All that reads messages, by name."""

from __future__ import annotations

from tests.fuzz.answers import Draftings, Verdicts
from tests.fuzz.drafts import Drafts
from tests.fuzz.generations import Generations
from tests.fuzz.sequences import DraftSequences, VerifySequences
from tests.fuzz.sockets import Sockets
from tests.fuzz.surface import Surface

_ALL: tuple[type[Surface], ...] = (
    *(Drafts, VerifySequences, DraftSequences, Generations, Draftings, Verdicts, Sockets),
)
SURFACES = {surface.name: surface for surface in _ALL}
