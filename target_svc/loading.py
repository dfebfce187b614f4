"""How a target is loaded: its model, and the drafts that it makes itself."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from tandem.checkpoint_memory import shares_of
from tandem.common.v1 import common_pb2
from tandem.drafting.choice.built_in import recipe_of
from tandem.drafting.choice.installed import drafter_of
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.decoders.model import OfModel
from tandem.drafting.drafter import OF_TARGET, Drafter, Recipe
from tandem.engine.schedule import BatchLimits
from tandem.errors import StartupError, first_line
from tandem.inference.decoder import Decoder
from tandem.inference.description import Description
from tandem.inference.kv.size import device_memory
from tandem.inference.loading.checkpoint import CheckpointSource
from tandem.inference.loading.extra_embeddings import embeddings_beside
from tandem.inference.loading.partial import WHOLE, ModelPart
from tandem.inference.model import Model
from tandem.inference.passes.overlapped import ONE_PIPELINE, Pipelines, two_pipelines
from tandem.inference.views.few_keys import positions_of
from tandem.inference.views.overlapped import OverlappedDecoder
from tandem.inference.vllm.arguments import VllmOptions
from tandem.rpc import messages
from tandem.rpc.security.plaintext import stays_here
from tandem.serving.drafting import (
    law_of,
    load_models,
    parts_of_target,
    require_its_vocabulary,
)
from tandem.serving.fingerprint import fingerprint_of
from tandem.serving.model import load_decoder, options_of, prepare
from tandem.settings import read_settings
from tandem.speculation.feedback import FeedbackGiven, misfit
from tandem.target.v1 import target_pb2
from target_svc.drafts import OwnDrafts
from target_svc.overlap import Overlap
from target_svc.settings import TargetSettings, VllmSettings

_log = structlog.get_logger(__name__)

# Of OVERLAP, for a model that uses its layers several times.
_CYCLES = "cycles"


def load_target(settings: TargetSettings, views: Sequence[ModelPart] = (), kept: int = 0) -> Model:
    """The target's model.

    Args:
        settings: of the target.
        views: parts of it that draft.
        kept: positions of a device that are left for their own pools.

    Raises:
        StartupError: one sentence on what is missing, broken or too large.
    """
    if settings.engine == "vllm":
        if views:
            raise StartupError(
                "TANDEM_TARGET_DRAFTS: ENGINE=vllm has no part of a target that drafts; name the"
                " target's checkpoint as the recipe's model, for a copy"
            )
        model = _load_by_vllm(settings)
    else:
        model = _load_here(settings, views, kept)
    if masked := model.about.masked_ids:
        _log.info(
            "ids without a token are never drawn (TANDEM_TARGET_PADDED_IDS)",
            count=len(masked),
            first=masked[0],
        )
    return model


def _load_here(settings: TargetSettings, views: Sequence[ModelPart], kept: int) -> Model:
    source = CheckpointSource(
        settings.model,
        settings.device,
        settings.dtype,
        adapter=settings.adapter,
        extra_embeddings=settings.extra_embeddings or embeddings_beside(settings.adapter),
        masks=settings.padded_ids == "mask",
    )
    options = options_of(settings)
    options = replace(
        options,
        trees=settings.max_nodes > 0,
        states_of=settings.feedback,
        views=tuple(view for view in views if view != WHOLE),
        kept=kept,
    )
    alone = WHOLE in views or settings.overlap  # torch alone shows keys, or goes by groups
    if alone and settings.engine == "auto":
        options = replace(options, engine="torch")
    return load_decoder(source, options, settings)


def _load_by_vllm(settings: TargetSettings) -> Model:
    if settings.extra_embeddings:
        raise StartupError(
            "TANDEM_TARGET_EXTRA_EMBEDDINGS: ENGINE=vllm takes none; use another ENGINE"
        )
    if settings.overcommit > 1:
        raise StartupError(
            "TANDEM_TARGET_OVERCOMMIT: ENGINE=vllm gives each sequence all of its memory; leave it"
            " at 1"
        )
    if settings.adapter:
        raise StartupError(
            "TANDEM_TARGET_ADAPTER: ENGINE=vllm takes no adapter; merge it into a checkpoint, or"
            " use another ENGINE"
        )
    if settings.feedback != "none":
        raise StartupError("TANDEM_TARGET_FEEDBACK: ENGINE=vllm gives no hidden states; unset it")
    from tandem.inference.vllm.model import VllmModel

    options = vllm_options(settings, read_settings(VllmSettings))
    model = VllmModel.load(options)
    prepare(model, settings)
    return model


def vllm_options(settings: TargetSettings, own: VllmSettings) -> VllmOptions:
    """What is asked of vLLM.

    Raises:
        StartupError: the file of further arguments cannot be read.
    """
    further: dict[str, Any] = {}
    if own.arguments is not None:
        try:
            further = tomllib.loads(own.arguments.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise StartupError(
                f"TANDEM_TARGET_VLLM_ARGUMENTS: cannot read {own.arguments}: {first_line(error)}"
            ) from error
    if own.leader and settings.plaintext != "allow" and not stays_here(own.leader):
        raise StartupError(
            "TANDEM_TARGET_VLLM_NODES: the machines of one model talk in plaintext, without a"
            " password; set PLAINTEXT=allow, and let nobody else into their network"
        )
    limits = BatchLimits(settings.token_budget, settings.prefill_chunk)
    return VllmOptions(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        max_sequences=settings.max_sequences,
        max_length=settings.longest,
        cache_tokens=settings.cache_tokens,
        largest_pass=limits.largest + settings.max_gamma + 1,
        max_gamma=settings.max_gamma,
        tensor_parallel=own.tensor_parallel,
        nodes=own.nodes,
        node=own.node,
        leader=own.leader,
        quantization=own.quantization,
        memory_share=own.memory_share * settings.memory_share,
        prefix_cache=settings.prefix_cache,
        eager=own.eager,
        checked=own.checked,
        further=further,
        masks=settings.padded_ids == "mask",
    )


def overlap_of(settings: TargetSettings, target: Model) -> Overlap | None:
    """How the layers of a target overlap in rounds without a draft; None where they do not.

    Raises:
        StartupError: they cannot.
    """
    if not settings.overlap:
        return None
    assert isinstance(target, Decoder)  # see `check_overlap`
    exit_ = 0 if settings.overlap == _CYCLES else int(settings.overlap)
    pipelines: Pipelines = ONE_PIPELINE
    if settings.overlap_pipelines > 1:
        if target.device.type != "cpu":
            raise StartupError(
                "TANDEM_TARGET_OVERLAP_PIPELINES: two groups of layers are computed together on a"
                f" CPU alone, and DEVICE is {settings.device}"
            )
        pipelines = two_pipelines()
    try:
        scorer = OverlappedDecoder(target, exit_, settings.overlap_guesses, pipelines)
    except StartupError as error:
        raise StartupError(f"TANDEM_TARGET_OVERLAP={settings.overlap}: {error}") from error
    _log.info(
        "layers overlap in rounds without a draft",
        groups=scorer.groups,
        exit_behind=scorer.exit,
        guesses=settings.overlap_guesses,
        pipelines=settings.overlap_pipelines,
    )
    return Overlap(scorer, scorer.groups, scorer.exit, settings.overlap_guesses)


def check_overlap(settings: TargetSettings) -> None:
    """What can be said of OVERLAP before a model is loaded.

    Raises:
        StartupError: it does not go together with another setting.
    """
    further = [
        name
        for name, value in (
            ("OVERLAP_GUESSES", settings.overlap_guesses),
            ("OVERLAP_PIPELINES", settings.overlap_pipelines),
        )
        if value > 1
    ]
    if settings.overlap in ("", _CYCLES) and further:
        raise StartupError(
            f"TANDEM_TARGET_{further[0]}: only with the number of an exit's layers in"
            f" TANDEM_TARGET_OVERLAP, which is {settings.overlap or 'unset'}"
        )
    if settings.overlap and settings.engine not in ("auto", "torch"):
        raise StartupError(
            f"TANDEM_TARGET_OVERLAP: ENGINE={settings.engine} computes whole passes alone; set"
            " ENGINE=torch, or unset OVERLAP"
        )


def own_recipe(settings: TargetSettings) -> tuple[Recipe, RecipeSettings] | None:
    """What a target drafts by itself, and its settings; None where it drafts nothing.

    Raises:
        StartupError: what is wrong with it, and where.
    """
    if not settings.drafts:
        return None
    keys = read_settings(RecipeSettings, whole=False).model_copy(update={"recipe": settings.drafts})
    if keys.online:
        raise StartupError(
            "TANDEM_DRAFTER_ONLINE: a target that drafts does not learn; unset it, or run a drafter"
            " service with a checkpoint of its own (tandem up --no-drafts-inside)"
        )
    recipe = recipe_of(keys)
    if keys.model == OF_TARGET and isinstance(recipe, OfModel) and not recipe.model:
        # So its description says that a part of the target drafts.
        recipe = recipe.model_copy(update={"model": OF_TARGET})
    return recipe, keys


def views_of(
    own: tuple[Recipe, RecipeSettings] | None, settings: TargetSettings
) -> list[ModelPart]:
    """The parts of the target that draft; of its own recipe.

    Raises:
        StartupError: it cannot have them.
    """
    if own is None:
        return []
    recipe, keys = own
    views = parts_of_target(recipe, keys.model)
    if any((one.path or keys.model) != OF_TARGET for one in recipe.checkpoints) or not views:
        return views  # the drafter's settings are for its other models
    device, asked = _devices(settings)
    if asked not in ("", device):
        raise StartupError(
            "TANDEM_TARGET_DRAFT_DEVICE: a part of the target computes where the target does; unset"
            " it"
        )
    if keys.dtype not in ("auto", settings.dtype):
        raise StartupError(
            f"TANDEM_DRAFTER_DTYPE={keys.dtype}: a part of the target has the target's weights, in"
            " their dtype; unset it"
        )
    return views


def share_of_target(own: tuple[Recipe, RecipeSettings] | None, settings: TargetSettings) -> float:
    """Share of the device's memory for the target itself: models of its own recipe that are there
    too have theirs."""
    share = settings.memory_share
    device, asked = _devices(settings)
    if own is None or asked not in ("", device):
        return share
    recipe, keys = own
    drafters = [named.path or keys.model for named in recipe.checkpoints]
    models = [settings.model, *(path for path in drafters if path != OF_TARGET)]
    total = device_memory(device) if len(models) > 1 else None
    return share * shares_of(models, None if total is None else int(total * share))[0]


def kept_for_views(own: tuple[Recipe, RecipeSettings] | None, settings: TargetSettings) -> int:
    """Positions that views of the target hold in pools of their own, for few keys of each text."""
    if own is None:
        return 0
    recipe, keys = own
    each = [
        positions_of(named.keys, settings.longest)
        for named in recipe.checkpoints
        if named.keys is not None and (named.path or keys.model) == OF_TARGET
    ]
    return settings.max_sequences * sum(each)


def _devices(settings: TargetSettings) -> tuple[str, str]:
    """Names of the target's device and of the drafts', one for each device."""
    device, asked = (
        name.replace("cuda:0", "cuda") for name in (settings.device, settings.draft_device)
    )
    return device, asked


def own_drafts(
    recipe: Recipe,
    keys: RecipeSettings,
    settings: TargetSettings,
    info: common_pb2.ModelInfo,
    target: Model,
) -> tuple[OwnDrafts, list[Model]]:
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
        update={
            "device": settings.draft_device or settings.device,
            "dtype": keys.dtype,
            "engine": "auto" if settings.engine == "vllm" else settings.engine,
        }
    )
    models = load_models(
        recipe, own, keys.model, keys.target or settings.model, keys.truncation, beside=target
    )
    drafter = drafter_of(recipe, models, keys.truncation)
    views = views_of((recipe, keys), settings)
    if any(view.skip for view in views):
        # All sublayers computed the text's keys, and some those of drafted tokens: a row depends on
        # where its round began.
        drafter.traits = replace(drafter.traits, pure=False)
    require_its_vocabulary(drafter, target.about)
    _require_feedback(drafter, info, target.about)
    traits, wanted = drafter.traits, drafter.traits.feedback
    described = target_pb2.TargetDrafts(
        drafter=recipe.method,
        recipe=recipe.model_dump_json(),
        fingerprint=fingerprint_of(*law_of(recipe, keys.truncation, models, drafter)),
        shape=messages.shape_to(traits.shape),
        pure=traits.pure,
        max_gamma=settings.max_gamma,
        max_nodes=min(recipe.largest_tree, info.max_nodes - wanted.probes),
        probes=wanted.probes,
        max_length=info.max_length,
        held_length=min([info.max_length, *(model.about.max_length for model in models)]),
    )
    beside = target.device.type != "cpu" and all(one.device == target.device for one in models)
    told = wanted.of(target.about.of_layers, on_device=True) if wanted.told else None
    # Only after an exit without `skip` are the states those of the target.
    exit_ = max((view.exit for view in views if not view.skip), default=0)
    if any(layer <= exit_ for layer in target.about.of_layers):
        exit_ = 0  # states of lower layers are wanted of whole passes
    return OwnDrafts(drafter, described, info.vocab_size, beside, told, exit_), models


def _require_feedback(drafter: Drafter, info: common_pb2.ModelInfo, target: Description) -> None:
    """Refuse a drafter that wants to be told, or to have computed, what the target cannot.

    Raises:
        StartupError: what is missing, or that it is a head for another target.
    """
    given = FeedbackGiven(
        name=target.name,
        weights_fingerprint=target.weights_fingerprint,
        hidden_size=target.hidden_size,
        layers=target.of_layers,
        probe_tokens=target.probe_tokens,
        max_nodes=info.max_nodes,
        last=target.layers + 1,
    )
    wanted = drafter.traits.feedback
    if fault := misfit(wanted, given):
        who = "the head" if wanted.layers else "the drafter"
        raise StartupError(f"TANDEM_TARGET_DRAFTS: {who} {fault}")
