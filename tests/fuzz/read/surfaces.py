"""All surfaces, that is, all code that reads messages, by name."""

from __future__ import annotations

from tests.fuzz.read.answers import Draftings, Prepareds, RunVerdicts, Verdicts
from tests.fuzz.read.bodies import Chats, Completions
from tests.fuzz.read.drafts import Drafts
from tests.fuzz.read.generations import Generations
from tests.fuzz.read.sequences import DraftSequences, VerifySequences
from tests.fuzz.read.sockets import Sockets
from tests.fuzz.read.surface import Surface

_ALL: tuple[type[Surface], ...] = (
    *(
        Drafts,
        VerifySequences,
        DraftSequences,
        Generations,
        Draftings,
        Prepareds,
        Verdicts,
        RunVerdicts,
        Completions,
        Chats,
        Sockets,
    ),
)
SURFACES = {surface.name: surface for surface in _ALL}
