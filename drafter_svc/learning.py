"""How a drafter that learns is put together: its folder, its trainer's order, its new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafter_svc.settings import DrafterSettings
from tandem.drafting.drafter import Recipe
from tandem.errors import StartupError
from tandem.online.kept_text import NO_STATES, KeptStates
from tandem.online.learning import Learning
from tandem.online.order import Order
from tandem.online.state import StateFolder
from tandem.settings import MIB
from tandem.speculation.feedback import FeedbackWanted

if TYPE_CHECKING:
    from tandem.inference.model import Model

_HOUR = 3600.0


def state_of(settings: DrafterSettings, recipe: Recipe) -> StateFolder | None:
    """The folder of what is learnt; None where nothing is.

    Raises:
        StartupError: this drafter cannot learn, or its folder is missing, another's or broken.
    """
    if not settings.online:
        return None
    if len(recipe.checkpoints) != 1:
        raise StartupError(
            f"ONLINE: the method {recipe.method} does not learn; one with a single decoder or head"
            " does, such as model, tree or eagle. Set ONLINE=0"
        )
    if recipe.checkpoints[0].keys is not None:
        raise StartupError(
            "ONLINE: a decoder with a window of its text does not learn. Set ONLINE=0"
        )
    if settings.online_folder is None:
        raise StartupError("ONLINE needs ONLINE_FOLDER, a folder for what is learnt")
    return StateFolder(settings.online_folder)


def learning_of(
    settings: DrafterSettings, recipe: Recipe, folder: StateFolder, model: Model
) -> Learning:
    """What learns beside a loaded model, not begun.

    Raises:
        StartupError: home texts of a head cannot be computed.
    """
    from tandem.inference.heads.head import Head
    from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
    from tandem.inference.loading.learnt_weights import LearntWeights
    from tandem.inference.loading.partial import ModelPart

    named = recipe.checkpoints[0]
    part = ModelPart(named.exit, named.skip)
    source = CheckpointSource(
        named.path or settings.model, settings.device, settings.dtype, named.adapter, part
    )

    def renew(version: int, weights: Path | None) -> Callable[[], None]:
        path = "" if weights is None else str(weights)
        learnt = LearntWeights(version, path, model.about.weights_fingerprint)
        if isinstance(model, Head):
            return model.with_learnt(learnt)
        return model.renewed(lambda: read_checkpoint(replace(source, learnt=learnt)))

    keeps, target = NO_STATES, ""
    if isinstance(model, Head):
        each = FeedbackWanted(model.reads, model.hidden_size).state_bytes
        keeps = KeptStates(each, model.learnt_depths, model.remembers)
        target = named.target or settings.target
        if settings.online_home and not target:
            raise StartupError(
                "ONLINE_HOME: hidden states of home texts are those of the head's target: name its"
                " checkpoint with TANDEM_DRAFTER_TARGET"
            )
    folder.know(model.about.weights_fingerprint)
    order = Order(
        model=source.model,
        head=named.head,
        target=target,
        adapter=named.adapter,
        exit=named.exit,
        skip=named.skip,
        folder=str(folder.path),
        home=settings.online_home,
        seconds=settings.online,
        most_bytes=settings.online_mib * MIB,
        most_seconds=settings.online_hours * _HOUR,
    )
    return Learning(folder, order, renew, keeps=keeps)
