"""A checkpoint as it is served: its weights are read, changed and hashed here, once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from tandem.inference.description import Description, describe
from tandem.inference.fingerprint import fingerprints
from tandem.inference.loading.adapter import adapter_fingerprint, merge_adapter
from tandem.inference.loading.extra_embeddings import MadeFor, add_embeddings, embeddings_for
from tandem.inference.loading.learnt_weights import NOTHING_LEARNT, LearntWeights, put_in
from tandem.inference.loading.outline import fingerprints_of_files, read_outline
from tandem.inference.loading.partial import WHOLE, ModelPart, take_part
from tandem.inference.loading.shared_layers import share_layers
from tandem.inference.loading.weights import read_model, read_tokenizer, sharing_weights
from tandem.vocabulary import ids_without_token


@dataclass(frozen=True)
class CheckpointSource:
    """Where a checkpoint comes from, and what is changed of it.

    Attributes:
        model: directory or hub id.
        device: as torch names it ("cpu", "cuda", "cuda:1"); "meta" for a model without its weights,
            which another engine reads.
        dtype: a name; "auto" is float32 on a CPU (a drafter may later use a faster one), else the
            checkpoint's.
        adapter: folder of an adapter to merge into the weights; empty for none.
        part: what is computed of the model.
        extra_embeddings: folder with rows for ids beyond the vocabulary; empty for none.
        masks: whether ids without a token of the tokenizer are never drawn, see `masked`.
        learnt: weights that take the place of the checkpoint's; they are in none of its hashes.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    adapter: str = ""
    part: ModelPart = WHOLE
    extra_embeddings: str = ""
    masks: bool = False
    learnt: LearntWeights = NOTHING_LEARNT


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model, and what is told of it.

    Attributes:
        model: with its weights on their device; none on "meta".
        about: what is told of it. Rows of extra embeddings are in none of its hashes.
    """

    model: PreTrainedModel
    about: Description


def read_checkpoint(source: CheckpointSource) -> LoadedCheckpoint:
    """Read a checkpoint, and change it as its source says.

    Raises:
        OtherCheckpoint: weights were learnt from another one.
        StartupError: what is missing or broken, or does not fit, in one sentence.
    """
    outline = source.device == "meta"
    if outline:
        model = read_outline(source.model)
    else:
        model = read_model(source.model, source.device, source.dtype)
    tokenizer = read_tokenizer(source.model)
    served = MadeFor()
    if source.extra_embeddings:
        whole = sharing_weights(model)  # adapters name the layers as they are stored
        share_layers(whole)
        served = MadeFor(fingerprints(whole, "").weights, adapter_fingerprint(source.adapter))
    if source.adapter:
        model = merge_adapter(model, source.adapter)
    if not outline:
        share_layers(model)
    if source.part != WHOLE:
        take_part(model, source.part)
    about = describe(model, Path(source.model).name, tokenizer)
    if outline:
        hashes = fingerprints_of_files(source.model, about.tokenizer_fingerprint)
    else:
        hashes = fingerprints(model, about.tokenizer_fingerprint)
    about = replace(about, fingerprint=hashes.model, weights_fingerprint=hashes.weights)
    if source.learnt != NOTHING_LEARNT:
        put_in(model, hashes.weights, source.learnt)
        about = replace(about, weights_version=source.learnt.version)
    if source.masks:
        about = masked(about)
    if source.extra_embeddings:
        rows = embeddings_for(model, source.extra_embeddings, served)
        add_embeddings(model, rows)
        about = replace(about, probe_tokens=len(rows))
    return LoadedCheckpoint(model, about)


def masked(about: Description) -> Description:
    """A model that gives no probability to ids that its tokenizer has no token for.

    Published models pad their vocabularies, and few have holes. Such an id is no text: a client
    would pay for a token that it cannot read. Ids that end a text stay. It is another law, and so
    another fingerprint.
    """
    if about.tokenizer is None:
        return about
    ids = ids_without_token(about.tokenizer.get_vocab(), about.vocab_size)
    ids = [token_id for token_id in ids if token_id not in about.eos_token_ids]
    if not ids:
        return about
    law = json.dumps([about.fingerprint, ids])
    return replace(about, masked_ids=ids, fingerprint=hashlib.sha256(law.encode()).hexdigest())
