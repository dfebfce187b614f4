"""The models of a recipe, wherever it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tandem.checkpoint_memory import shares_of
from tandem.drafting.drafter import OF_TARGET, Checkpoint, Drafter, Recipe
from tandem.engine.asks import Truncation
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.description import Description
from tandem.inference.heads.load import load_head
from tandem.inference.kv.size import Room, device_memory
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.loading.checkpoint import CheckpointSource
from tandem.inference.loading.learnt_weights import NOTHING_LEARNT, LearntWeights
from tandem.inference.loading.partial import WHOLE, ModelPart
from tandem.inference.model import Model
from tandem.inference.views.few_keys import SparseView
from tandem.inference.views.part import ModelView
from tandem.inference.views.window import WindowedDecoder, window_of
from tandem.serving.model import load_decoder, max_length, options_of
from tandem.settings import ModelSettings
from tandem.vocabulary import difference


def load_models(
    recipe: Recipe,
    settings: ModelSettings,
    model: str,
    target: str,
    truncation: Truncation,
    beside: Model | None = None,
    ahead: int = 0,
    learnt: LearntWeights | None = None,
) -> list[Model]:
    """The decoders and heads that a recipe drafts with, one for each of its checkpoints.

    Args:
        recipe: what drafts.
        settings: how models are run.
        model: the checkpoint that the recipe calls "".
        target: the checkpoint that its heads are for, where the recipe names none.
        truncation: of the distributions that are drawn from.
        beside: a target in this process, which verifies the drafts.
        ahead: positions that each sequence has for drafts that are prepared ahead, which are
            branches; 0 where none are.
        learnt: weights in place of the checkpoint's, where there is one decoder, and others come
            while it serves; None where they stay.

    Raises:
        OtherCheckpoint: these were learnt from another one.
        StartupError: one sentence on what is missing or does not fit.
    """
    if not model and any(not checkpoint.path for checkpoint in recipe.checkpoints):
        raise StartupError(
            f"the recipe {recipe.method} needs a model: name one with TANDEM_DRAFTER_MODEL, or"
            " with --drafter of `tandem up`"
        )
    at_most = beside.positions if beside else settings.cache_for(0)
    options = replace(
        options_of(settings, ahead),
        drafts=settings.dtype == "auto",
        trees=ahead > 0 or recipe.largest_tree > 0,
        chains=None if recipe.largest_tree else (truncation.mass, truncation.support),
        renews=learnt is not None,
    )
    models: list[Model] = []
    shares = [settings.memory_share] * len(recipe.checkpoints)
    if beside is None:  # they are bounded by that one's positions
        shares = _shares(recipe, model, settings)
    views = parts_of_target(recipe, model)
    if views and not isinstance(beside, Decoder):
        raise StartupError(
            f"the recipe {recipe.method}: {OF_TARGET!r} is a part of a target, which drafts inside"
            " of it: set TANDEM_TARGET_DRAFTS there, or name a checkpoint"
        )
    for named, share in zip(recipe.checkpoints, shares, strict=True):
        if isinstance(beside, Decoder) and (named.path or model) == OF_TARGET:
            models.append(_view(beside, named, recipe, settings))
            continue
        source = CheckpointSource(
            named.path or model,
            settings.device,
            settings.dtype,
            adapter=named.adapter,
            part=ModelPart(named.exit, named.skip),
            learnt=NOTHING_LEARNT if learnt is None else learnt,
        )
        loaded: Model
        if named.head:
            room = Room(settings.cache_tokens, at_most, share)
            loaded = load_head(source, named.head, named.target or target, room)
        else:
            own = replace(options, share=share)
            loaded = _decoder(source, named.keys, own, settings, beside)
        if recipe.largest_tree and not loaded.takes_trees:
            raise StartupError(
                f"the model {loaded.about.name} cannot compute the branches of {recipe.method}; use"
                " the recipe model"
            )
        if ahead and not loaded.takes_trees:
            raise StartupError(
                f"the model {loaded.about.name} cannot compute the branches that AHEAD needs; set"
                " AHEAD=0"
            )
        for other in [*models[:1], *([beside] if beside else [])]:
            _require_one_vocabulary(other.about, loaded.about)
        models.append(loaded)
    return models


def _shares(recipe: Recipe, model: str, settings: ModelSettings) -> list[float]:
    """Of a device's memory, for each checkpoint of a recipe and those before it: several divide the
    service's part. On a CPU each may have all of it: memory is taken as it is used."""
    paths = [named.path or model for named in recipe.checkpoints]
    total = device_memory(settings.device)
    if total is None or len(paths) < 2:
        return [settings.memory_share] * len(paths)
    parts = shares_of(paths, int(total * settings.memory_share))
    return [settings.memory_share * part for part in accumulate(parts)]


def _decoder(
    source: CheckpointSource,
    keys: SparseKeys | None,
    options: DecoderOptions,
    settings: ModelSettings,
    beside: Model | None,
) -> Model:
    """A small decoder; measured. After a window its KV cache holds a window of each sequence."""
    if keys is None:
        return load_decoder(source, options, settings, beside)
    each = window_of(keys)
    # Chains in one replay know no window.
    options = replace(
        options,
        cache_tokens=settings.max_sequences * each,
        longest=each,
        chains=None,
        threads=None if beside else options.threads,
    )
    short = settings.model_copy(update={"max_length": each, "cache_tokens": options.cache_tokens})
    loaded = WindowedDecoder(load_decoder(source, options, short), keys)
    loaded.measure(each)
    return loaded


def _view(target: Decoder, named: Checkpoint, recipe: Recipe, settings: ModelSettings) -> Model:
    """A part of a target, or all of it over few keys; measured."""
    view: Model
    if named.keys is None:
        view = ModelView(target, ModelPart(named.exit, named.skip))
    else:
        view = SparseView(target, named.keys, settings.max_sequences)
    if recipe.method == "forest" and not view.takes_trees:  # whose chains are branches
        raise StartupError(
            f"the recipe {recipe.method}: {OF_TARGET!r} with few keys drafts no branches; use the"
            " recipe model"
        )
    view.measure(max_length(target, settings))
    return view


def parts_of_target(recipe: Recipe, model: str) -> list[ModelPart]:
    """The parts of a target that a recipe drafts with, the whole where it sees few keys; none where
    it has models of its own.

    Args:
        recipe: what drafts.
        model: the checkpoint that the recipe calls "".

    Raises:
        StartupError: it cannot have them so.
    """
    own = [one for one in recipe.checkpoints if (one.path or model) == OF_TARGET]
    others = [one.keys for one in recipe.checkpoints if one.keys and one not in own]
    if any(keys.kind == "chunks" for keys in others):
        raise StartupError(
            f"the recipe {recipe.method}: chunks are of the model {OF_TARGET!r}, the target itself;"
            " others see a window"
        )
    if not own:
        return []
    part, *more = own
    if more:
        raise StartupError(
            f"the recipe {recipe.method}: one model at most may be {OF_TARGET!r}: two parts of it"
            " would write over each other's rows"
        )
    if part.head:
        raise StartupError(
            f"the recipe {recipe.method}: a head is no part of a target: name its own"
        )
    if part.adapter:
        raise StartupError(
            f"the recipe {recipe.method}: {OF_TARGET!r} has the target's own weights; set"
            " TANDEM_TARGET_ADAPTER in place of the recipe's adapter"
        )
    layers = ModelPart(part.exit, part.skip)
    if part.keys is not None:
        if layers != WHOLE:
            raise StartupError(
                f"the recipe {recipe.method}: kv of {OF_TARGET!r} goes with neither exit nor skip:"
                " all layers see few keys"
            )
        return [layers]
    if layers == WHOLE:
        raise StartupError(
            f"the recipe {recipe.method}: {OF_TARGET!r} needs exit, skip or kv, of a method that is"
            " made of others in a recipe's file: the whole target drafts no faster than it verifies"
        )
    return [layers]


def law_of(
    recipe: Recipe, truncation: Truncation, models: Sequence[Model], drafter: Drafter
) -> tuple[str | float, ...]:
    """What determines drafts: the recipe, its truncation, its models, and other data."""
    fingerprints = [model.about.fingerprint for model in models]
    described = recipe.model_dump_json()
    return described, truncation.mass, truncation.support, *fingerprints, drafter.traits.data


def require_its_vocabulary(drafter: Drafter, model: Description) -> None:
    """Refuse a drafter whose index has the ids of another tokenizer.

    Raises:
        StartupError: it has.
    """
    if drafter.traits.vocabulary.tokenizer not in ("", model.tokenizer_fingerprint):
        raise StartupError(
            f"the index was built for another tokenizer than that of {model.name}: build one with"
            " `tandem index build --tokenizer` and the model's directory"
        )


def _require_one_vocabulary(first: Description, other: Description) -> None:
    """Refuse models of several tokenizers: a draft has tokens of all of them."""
    if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
        raise StartupError(
            f"the models {first.name} and {other.name} have different tokenizers:"
            f" {_difference(first, other)}; models that draft together, and their target, share one"
        )
    if not first.tokenizer_fingerprint and other.vocab_size != first.vocab_size:
        raise StartupError(
            f"the models {first.name} and {other.name} have {first.vocab_size} and"
            f" {other.vocab_size} token ids, and no tokenizer that would say which agree"
        )


def _difference(first: Description, other: Description) -> str:
    """The first token that differs, and how many both have."""
    from tokenizers import Tokenizer

    written = [model.tokenizer_json() for model in (first, other)]
    if not all(written):
        return f"{(first if written[1] else other).name} has none"
    vocabularies = [Tokenizer.from_buffer(each).get_vocab() for each in written]
    return difference(*vocabularies)
