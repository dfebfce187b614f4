"""Compares logits of ragged batches with those of a model's own plain passes."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import islice

import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import PreTrainedModel

from tandem.inference.choice.choose import EngineName
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tests.support.decoders import decoder_over
from tests.support.models.architectures import VOCAB_SIZE, WINDOW, Architecture, build

TOLERANCE = 1e-4
# Shorter and longer than the window and than a chunk of a prompt.
LENGTHS = (3, WINDOW, 21, 40)


def load(model: PreTrainedModel, engine: EngineName = "openvino") -> tuple[Decoder, list[str]]:
    """A decoder of a model with its fastest back end, and the reasons in its warnings."""
    with capture_logs() as logs:
        decoder = decoder_over(model, "tiny", cache_tokens=512, engine=engine)
        decoder.improve()
    return decoder, [str(line["reason"]) for line in logs if line["log_level"] == "warning"]


def random_texts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with eager attention, the reference: other kinds may leave out soft caps."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """[n, V] logits of each text, fed alone, in one pass and without a cache."""
    model = plain(model)
    return [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in texts]


Rows = list[dict[int, Tensor]]  # of each text, by position


def ragged_logits(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Rows:
    """See `ragged_rows`."""
    logits, _ = ragged_rows(decoder, texts)
    return logits


@torch.inference_mode()
def ragged_rows(decoder: Decoder, texts: Sequence[Sequence[int]]) -> tuple[Rows, Rows]:
    """Logits of the same texts by position, and hidden states if the decoder gives any, from random
    batches: some of the texts, some tokens of each, some rows of these, and rejected drafts."""
    rng = random.Random(2)
    caches = [decoder.reserve(len(text)) for text in texts]
    rows: Rows = [{} for _ in texts]
    states: Rows = [{} for _ in texts]
    while True:
        unfinished = [
            (text, cache, found)
            for text, cache, *found in zip(texts, caches, rows, states, strict=True)
            if cache is not None and cache.length < len(text)
        ]
        if not unfinished:
            for cache in filter(None, caches):
                decoder.release(cache)
            return rows, states
        feeds, kept = [], []
        every_row = rng.random() < 0.5
        for text, cache, found in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            count = rng.choice((1, 1, 2, 4, WINDOW + 3))
            news = text[cache.length : cache.length + count]
            # The tokens after the kept ones are wrong, and rolled back.
            keep = rng.choice((len(news), rng.randint(0, len(news))))
            wrong = [(token_id + 1) % VOCAB_SIZE for token_id in news[keep:]]
            wanted = len(news) if every_row else rng.randint(0, len(news))
            told = (
                rng.choice((0, len(news), rng.randint(0, len(news))))
                if decoder.about.of_layers
                else 0
            )
            feeds.append(Feed(cache, [*news[:keep], *wrong], wanted, states=told))
            kept.append((found, cache.length + keep))
        output = decoder.forward(feeds)
        logits = iter(output.logits.cpu())
        behind = iter(() if output.states is None else output.states.cpu())
        for feed, (found, length) in zip(feeds, kept, strict=True):
            for own, given, count in zip(
                found, (logits, behind), (feed.rows, feed.states), strict=True
            ):
                places = range(feed.cache.length - count, feed.cache.length)
                each = zip(places, islice(given, count), strict=True)
                own.update({place: row for place, row in each if place < length})
            feed.cache.rollback(length)


_EXPECTED: dict[tuple[str, str], list[Tensor]] = {}


def expected_logits(row: Architecture) -> list[Tensor]:
    """The plain logits of the random texts; computed once for an architecture."""
    key = row.model_type, repr(row.options)
    if key not in _EXPECTED:
        _EXPECTED[key] = plain_logits(build(row), random_texts())
    return _EXPECTED[key]


def worst_difference(row: Architecture, engine: EngineName = "torch") -> float:
    texts = random_texts()
    expected = expected_logits(row)
    decoder = decoder_over(build(row), row.name, cache_tokens=256, engine=engine)
    assert engine in ("auto", decoder.engine)
    found = ragged_logits(decoder, texts)
    assert torch.cat(expected).std() > 1, "too flat to show a difference"
    return float(differences(expected, found).max())


@torch.inference_mode()
def worst_with_states(row: Architecture, engine: EngineName = "torch") -> tuple[float, float]:
    """`worst_difference` of a decoder that gives hidden states too, and the largest difference of
    one of these from transformers' own, as a share of the layer's spread."""
    texts, model = random_texts(), build(row)
    own = plain(model)
    logits, expected = [], []
    for text in texts:
        found = own(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        logits.append(found.logits[0])
        expected.append(torch.stack([layer[0] for layer in found.hidden_states], 1))
    assert torch.cat(logits).std() > 1, "too flat to show a difference"
    spread = torch.cat(expected).std((0, 2))[:, None]
    states_of = "0,1,last" if len(expected[0][0]) > 2 else "0,last"
    decoder = decoder_over(model, row.name, cache_tokens=256, engine=engine, states_of=states_of)
    assert engine == decoder.engine
    rows, states = ragged_rows(decoder, texts)
    worst = float(differences(logits, rows).max())
    return worst, float((differences(expected, states) / spread).max())


def differences(expected: Sequence[Tensor], found: Sequence[dict[int, Tensor]]) -> Tensor:
    """[rows, V] absolute differences of the requested rows, which are more than half of all."""
    assert sum(map(len, found)) > sum(map(len, expected)) / 2
    return torch.stack(
        [
            (theirs[place] - ours).abs()
            for theirs, rows in zip(expected, found, strict=True)
            for place, ours in rows.items()
        ]
    )
