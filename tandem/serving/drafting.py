"""The models of a recipe, and the drafter over them, wherever it drafts."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.drafting.drafter import Recipe
from tandem.engine.asks import Truncation
from tandem.engine.scorer import Model
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.serving.model import load_decoder
from tandem.settings import ModelSettings


def load_decoders(
    recipe: Recipe, settings: ModelSettings, model: str, beside: Model | None = None
) -> list[Decoder]:
    """The decoders that a recipe drafts with, one for each of its checkpoints.

    Args:
        recipe: see there.
        settings: how models are run.
        model: the checkpoint that the recipe calls "".
        beside: a target in this process, which verifies the drafts.

    Raises:
        StartupError: one sentence on what is missing or does not fit.
    """
    if "" in recipe.checkpoints and not model:
        raise StartupError(
            f"the recipe {recipe.method} needs a model: name one with TANDEM_DRAFTER_MODEL, or"
            " with --drafter of `tandem up`"
        )
    decoders: list[Decoder] = []
    for name in recipe.checkpoints:
        own = settings.model_copy(update={"model": name or model})
        decoder = load_decoder(own, drafts=True, trees=recipe.largest_tree > 0, beside=beside)
        if recipe.largest_tree and not decoder.takes_trees:
            raise StartupError(
                f"the model {decoder.name} cannot compute the branches of {recipe.method}; use the"
                " recipe model"
            )
        for other in [*decoders[:1], *([beside] if beside else [])]:
            _require_one_vocabulary(other, decoder)
        decoders.append(decoder)
    return decoders


def law_of(
    recipe: Recipe, truncation: Truncation, decoders: Sequence[Model]
) -> tuple[str | float, ...]:
    """What drafts hang on: the recipe, its truncation, and its models."""
    fingerprints = [decoder.fingerprint for decoder in decoders]
    return recipe.model_dump_json(), truncation.mass, truncation.support, *fingerprints


def _require_one_vocabulary(first: Model, other: Model) -> None:
    """Refuse models of several tokenizers: a draft has tokens of all of them."""
    if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
        raise StartupError(
            f"the models {first.name} and {other.name} have different tokenizers; models that"
            " draft together, and their target, share one"
        )
    if not first.tokenizer_fingerprint and other.vocab_size != first.vocab_size:
        raise StartupError(
            f"the models {first.name} and {other.name} have {first.vocab_size} and"
            f" {other.vocab_size} token ids, and no tokenizer that would say which agree"
        )
