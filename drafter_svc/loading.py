"""How a service of a recipe is loaded: its models, its engine, its drafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from drafter_svc.learning import learning_of, state_of
from drafter_svc.preparing import NOTHING_AHEAD, AheadLimits
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.drafting.ahead.prepare import room_for
from tandem.drafting.choice.built_in import recipe_of
from tandem.drafting.choice.installed import drafter_of
from tandem.drafting.drafter import Drafter, Recipe
from tandem.engine.admission import Admission
from tandem.engine.engine import Engine
from tandem.engine.schedule import BatchLimits
from tandem.errors import StartupError
from tandem.online.kept_text import wish_of
from tandem.online.learning import Learning, LearningStatus
from tandem.online.state import StateFolder
from tandem.rpc.messages import AROUND_BYTES, PROTOCOL_VERSION
from tandem.serving.fingerprint import fingerprint_of
from tandem.serving.loaded import LoadedService
from tandem.serving.servicer import admission_limits
from tandem.settings import KIB, MIB
from tandem.telemetry.metrics import catalog as metrics

if TYPE_CHECKING:
    from tandem.inference.loading.learnt_weights import LearntWeights
    from tandem.inference.model import Model
    from tandem.telemetry.metrics.instruments import Instruments

_log = structlog.get_logger(__name__)

# Tokens of a sequence at least: a prompt, and one after it.
_FEWEST = 2
_NO_EFFECT = "AHEAD has no effect: drafts of this method are not prepared"


@dataclass(frozen=True)
class LoadedDrafter(LoadedService):
    """A drafter with its recipe.

    Attributes:
        drafter: drafts.
        method: name of its recipe's.
        recipe: of which it is made, as JSON.
        ahead: what may be prepared ahead.
        learning: from texts, while it serves; None for none.
    """

    drafter: Drafter
    method: str
    recipe: str
    ahead: AheadLimits = NOTHING_AHEAD
    learning: Learning | None = None

    def improve(self) -> None:
        """See `LoadedService`; after it weights may change."""
        try:
            super().improve()
        finally:
            if self.learning is not None:
                self.learning.begin()

    def meter(self, instruments: Instruments) -> None:
        """See `LoadedService`."""

        def status() -> LearningStatus:
            return LearningStatus() if self.learning is None else self.learning.status

        watch = instruments.watch
        watch(metrics.WEIGHTS_VERSION, lambda: status().version, metrics.DRAFTER)
        watch(metrics.LEARNING_TEXTS, lambda: status().held_texts, metrics.DRAFTER)
        for name in metrics.OVERLAPS:
            read = partial(lambda own: status().overlap.get(own, math.nan), name)
            watch(metrics.LEARNING_OVERLAP, read, metrics.DRAFTER, name)

    def close(self) -> None:
        """See `LoadedService`."""
        if self.learning is not None:
            self.learning.close()
        super().close()


def load(settings: DrafterSettings) -> LoadedDrafter:
    """A service of the recipe that the settings name.

    Raises:
        StartupError: one sentence on what is wrong with the recipe, or with a model of it.
    """
    recipe = recipe_of(settings)
    folder = state_of(settings, recipe)
    try:
        if recipe.checkpoints:
            loaded = _with_models(settings, recipe, folder)
        else:
            loaded = _alone(settings, recipe)
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    wanted = loaded.drafter.traits.feedback
    if wanted.layers:
        loaded.info.hidden_size = wanted.hidden_size
    return loaded


def _with_models(
    settings: DrafterSettings, recipe: Recipe, folder: StateFolder | None
) -> LoadedDrafter:
    """Models score, one for each of the recipe's checkpoints."""
    # Here, since the other methods run where torch is not installed.
    from tandem.serving.drafting import law_of, load_models, require_its_vocabulary
    from tandem.serving.model import engine_over, info_of

    prepares = settings.ahead if recipe.drafter.traits.prepares else 0
    room = room_for(prepares, recipe.largest_tree or settings.max_gamma)
    truncation = settings.truncation
    named = recipe, settings, settings.model, settings.target, truncation
    if folder is None:
        models = load_models(*named, ahead=room)
    else:
        models = _learnt(folder, settings, lambda learnt: load_models(*named, None, room, learnt))
    drafter = drafter_of(recipe, models, truncation)
    if folder is not None:
        wanted = wish_of(drafter.traits.feedback, recipe.method)
        drafter.traits = replace(drafter.traits, feedback=wanted)
    require_its_vocabulary(drafter, models[0].about)
    info = info_of(models[0], settings, *law_of(recipe, truncation, models[1:], drafter))
    info.vocab_size = max(model.vocab_size for model in models)
    info.max_length = min(info.max_length, *(model.about.max_length for model in models))
    info.cache_tokens = min((each.positions for each in models if each.positions), default=0)
    info.parameters = sum(model.about.parameters for model in models)
    info.max_nodes = recipe.largest_tree
    if prepares and not settings.max_length:
        left = info.cache_tokens - recipe.largest_tree - room
        info.max_length = min(info.max_length, max(left, _FEWEST))
    ahead = _ahead_of(settings, drafter, info, room)
    engine = engine_over(models, settings, "drafter-engine")
    described = recipe.model_dump_json()
    return LoadedDrafter(
        engine=engine,
        info=info,
        models=models,
        drafter=drafter,
        method=recipe.method,
        recipe=described,
        ahead=AheadLimits(
            ahead,
            min(settings.ahead_kib * KIB, settings.max_message_mib * MIB - AROUND_BYTES),
        ),
        learning=None if folder is None else learning_of(settings, recipe, folder, models[0]),
    )


def _learnt(
    folder: StateFolder,
    settings: DrafterSettings,
    load: Callable[[LearntWeights], list[Model]],
) -> list[Model]:
    """The models, with what was learnt.

    Raises:
        StartupError: it was learnt from another checkpoint.
    """
    from tandem.inference.loading.learnt_weights import LearntWeights, OtherCheckpoint

    learnt = folder.learnt
    try:
        return load(LearntWeights(learnt.version, folder.weights, learnt.of))
    except OtherCheckpoint as error:
        if not settings.online_anew:
            raise StartupError(
                f"what ONLINE_FOLDER holds {error}: give another folder, or set ONLINE_ANEW=true"
            ) from None
    return load(LearntWeights(folder.begin_again(anew=True).version))


def _ahead_of(
    settings: DrafterSettings, drafter: Drafter, info: common_pb2.ModelInfo, room: int
) -> int:
    """Drafted tokens that may be prepared at a time.

    Args:
        settings: of the service.
        drafter: whose drafts are prepared.
        info: with its limits.
        room: positions of each sequence for them.

    Raises:
        StartupError: a sequence of the greatest length has no room for them.
    """
    if not settings.ahead:
        return 0
    if drafter.traits.looks is None:
        _log.warning(_NO_EFFECT)
        return 0
    needed = info.max_length + drafter.traits.largest_tree + room
    if info.cache_tokens < needed:
        raise StartupError(
            f"AHEAD={settings.ahead}: a sequence of {info.max_length} tokens takes {needed}"
            " positions with the drafts that are prepared for it, and the KV cache has"
            f" {info.cache_tokens}; lower AHEAD or MAX_LENGTH, or raise CACHE_TOKENS"
        )
    return settings.ahead


def _alone(settings: DrafterSettings, recipe: Recipe) -> LoadedDrafter:
    """No model, no pool, no step of the engine."""
    engine = Engine(
        "drafter-engine", Admission((), admission_limits(settings)), BatchLimits(), None
    )
    described = recipe.model_dump_json()
    drafter = drafter_of(recipe, (), settings.truncation)
    traits = drafter.traits
    info = common_pb2.ModelInfo(
        model=recipe.method,
        protocol_version=PROTOCOL_VERSION,
        max_length=settings.longest,
        max_gamma=settings.max_gamma,
        max_sequences=settings.max_sequences,
        device="cpu",
        max_message_bytes=settings.max_message_mib * MIB,
        fingerprint=fingerprint_of(described, traits.data),
        zone=settings.zone,
        max_nodes=traits.largest_tree,
        vocab_size=traits.vocabulary.size,
        tokenizer_fingerprint=traits.vocabulary.tokenizer,
    )
    if settings.ahead:
        _log.warning(_NO_EFFECT)
    return LoadedDrafter(engine, info, (), drafter, recipe.method, described)
