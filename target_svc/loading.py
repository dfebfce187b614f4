"""How the drafts that a target makes itself are loaded: their recipe, its models, its drafter."""

from __future__ import annotations

from tandem.common.v1 import common_pb2
from tandem.drafting.choice.built_in import recipe_of
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.drafter import Recipe
from tandem.engine.scorer import Model
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.rpc import messages
from tandem.serving.drafting import law_of, load_decoders
from tandem.serving.fingerprint import fingerprint_of
from tandem.serving.model import passes_of
from tandem.settings import read_settings
from tandem.target.v1 import target_pb2
from target_svc.drafts import OwnDrafts
from target_svc.settings import TargetSettings


def own_recipe(settings: TargetSettings) -> tuple[Recipe, RecipeSettings] | None:
    """What a target drafts by itself, and its settings; None where it drafts nothing.

    Raises:
        StartupError: what is wrong with it, and where.
    """
    if not settings.drafts:
        return None
    keys = read_settings(RecipeSettings).model_copy(update={"recipe": settings.drafts})
    return recipe_of(keys), keys


def own_drafts(
    recipe: Recipe,
    keys: RecipeSettings,
    settings: TargetSettings,
    info: common_pb2.ModelInfo,
    target: Model,
) -> tuple[OwnDrafts, list[Decoder]]:
    """A recipe's drafter in the target's process, and the models that it drafts with.

    Args:
        recipe: what drafts.
        keys: its settings.
        settings: of the target.
        info: of the target, with the limits that it announces.
        target: loaded.

    Raises:
        StartupError: one sentence on what is missing, does not fit, or is too large.
    """
    if recipe.largest_tree and not info.max_nodes:
        raise StartupError(
            f"TANDEM_TARGET_DRAFTS: {recipe.method} drafts trees, and this target takes chains"
            " alone; raise MAX_NODES, or use the recipe model"
        )
    own = settings.model_copy(
        update={"device": settings.draft_device or settings.device, "dtype": keys.dtype}
    )
    decoders = load_decoders(recipe, own, keys.model, beside=target)
    drafter = recipe.make(decoders, keys.truncation)
    described = target_pb2.TargetDrafts(
        drafter=recipe.method,
        recipe=recipe.model_dump_json(),
        fingerprint=fingerprint_of(*law_of(recipe, keys.truncation, decoders)),
        shape=messages.shape_to(drafter.shape),
        pure=drafter.pure,
        max_gamma=settings.max_gamma,
        max_nodes=min(recipe.largest_tree, info.max_nodes),
        pass_times=[each for decoder in decoders[:1] for each in passes_of(decoder)],
        max_length=min([info.max_length, *(decoder.max_length for decoder in decoders)]),
    )
    beside = target.device.type != "cpu" and all(one.device == target.device for one in decoders)
    return OwnDrafts(drafter, described, info.vocab_size, on_device=beside), decoders
