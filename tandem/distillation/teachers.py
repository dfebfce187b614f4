"""Texts that models continue, and targets (of a checkpoint here, or served) that say their rows."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from tandem.client.blocking import Client
from tandem.client.errors import CallFailed, Lost, TimedOut
from tandem.client.results import GeneratedText, GeneratedToken
from tandem.distillation.divergences import TargetRows
from tandem.errors import StartupError, Unavailable
from tandem.inference.description import end_token_ids
from tandem.vocabulary import vocabulary_fingerprint

# Calls at once, and what a reply may tell of each place.
_CALLS, _MOST_TOP = 8, 20
# How long a target that is away is waited for, and between two attempts.
WAIT_SECONDS, _PAUSE_SECONDS = 600.0, 2.0
_SAY_SECONDS = 30.0

# What a target that is computed here tells of each place of its own texts.
_TOP = 64

Say = Callable[[str], None]


@torch.no_grad()
def continue_rows(
    model: Any,
    tokens: Tensor,
    known: Tensor,
    vocabulary: int,
    generator: torch.Generator | None,
    told: Callable[[int, Tensor], None] = lambda place, logits: None,
) -> Tensor:
    """Fill rows after what is known of them, one position of all rows a pass.

    Args:
        model: of transformers.
        tokens: [rows, time] of int64.
        known: [rows] how many of each row's first tokens are given; at least one.
        vocabulary: only ids below it are drawn.
        generator: draws at temperature 1; None takes the likeliest token.
        told: called with the logits [rows, vocabulary] of each place that is filled.

    Returns:
        [rows, time].
    """
    filled = tokens.clone()
    first, time = int(known.min()), tokens.shape[1]
    cache, seen = None, filled[:, :first]
    for place in range(first, time):
        found = model(input_ids=seen, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
        logits = found.logits[:, -1, :vocabulary].float()
        told(place, logits)
        if generator is None:
            drawn = logits.argmax(-1)
        else:
            row = logits.softmax(-1).to(generator.device)
            drawn = torch.multinomial(row, 1, generator=generator)[:, 0].to(tokens.device)
        filled[:, place] = torch.where(place < known, filled[:, place], drawn)
        seen = filled[:, place : place + 1]
    return filled


@dataclass
class KnownTexts:
    """Texts of a batch that a target computed here; others that begin alike go on from them."""

    _tokens: Tensor | None = None
    _cache: DynamicCache | None = None

    def cut(self, tokens: Tensor, config: Any, most: int) -> DynamicCache:
        """Keep what is known of texts, in a cache that their other tokens are computed into.

        Args:
            tokens: [rows, time], which are known from then on.
            config: of the target's model.
            most: positions to keep at most.
        """
        common, before, cache = 0, self._tokens, self._cache
        # Layers of other kinds cannot go back.
        if (
            before is not None
            and cache is not None
            and all(type(layer) is DynamicLayer for layer in cache.layers)
        ):
            size = min(before.shape[1], tokens.shape[1], most)
            equal = (before[:, :size] == tokens[:, :size]).all(0)
            common = int(equal.int().cumprod(0).sum())
            cache.crop(common - before.shape[1])
        if not common or cache is None:
            cache = DynamicCache(config=config)
        self._tokens, self._cache = tokens, cache
        return cache


class Teacher(ABC):
    """A target.

    Attributes:
        vocabulary: how many ids it knows.
        ends: the tokens that end its texts.
        tells_little: whether its rows are of a few tokens, so that many are held at once.
    """

    vocabulary: int
    ends: Sequence[int]
    tells_little = False

    @abstractmethod
    def rows(self, tokens: Tensor, last: int = 0, known: KnownTexts | None = None) -> TargetRows:
        """What it says after each token but the last.

        Args:
            tokens: [rows, time + 1] of int64.
            last: of how many places, the last ones; 0 for all.
            known: of the same batch, in calls with `last`; what texts have in common is computed
                once.

        Returns:
            Rows [rows, time or last, k].
        """

    @abstractmethod
    def continued(
        self, tokens: Tensor, known: Tensor, vocabulary: int, seed: int
    ) -> tuple[Tensor, TargetRows]:
        """Texts filled with its samples at temperature 1 (see `continue_rows`), and what it said
        while it wrote: its likeliest tokens after each token but the last."""


class LocalTeacher(Teacher):
    """A target's model in this process.

    Args:
        model: of transformers.
        device: that has it.
        tokenizer: of the pair; None leaves out the token that it ends texts with.
    """

    def __init__(self, model: Any, device: torch.device, tokenizer: Any = None) -> None:
        self.ends = end_token_ids(model, tokenizer)
        self.vocabulary = model.config.get_text_config().vocab_size
        self._model, self._device = model, device

    @torch.no_grad()
    def rows(self, tokens: Tensor, last: int = 0, known: KnownTexts | None = None) -> TargetRows:
        """See `Teacher`."""
        fed = tokens[:, :-1].to(self._device)
        options: dict[str, Any] = {"use_cache": False}
        if known is not None:
            cache = known.cut(fed, self._model.config, fed.shape[1] - last)
            options = {"use_cache": True, "past_key_values": cache}
            fed = fed[:, cache.get_seq_length() :]
        found = self._model(input_ids=fed, logits_to_keep=last, **options).logits
        return TargetRows(found.float().log_softmax(-1))

    def continued(
        self, tokens: Tensor, known: Tensor, vocabulary: int, seed: int
    ) -> tuple[Tensor, TargetRows]:
        """See `Teacher`."""
        generator = torch.Generator().manual_seed(seed)
        top = min(_TOP, vocabulary - 1)
        told = _nothing_said(tokens, top)
        assert told.ids is not None

        def tell(place: int, logits: Tensor) -> None:
            values, ids = logits.log_softmax(-1).topk(top)
            told.log_probs[:, place - 1], told.ids[:, place - 1] = values, ids  # type: ignore[index]

        at = tokens.to(self._device), known.to(self._device)
        return continue_rows(self._model, *at, vocabulary, generator, tell).to("cpu"), told


class ServedTeacher(Teacher):
    """A target that an orchestrator serves. It tells of each place its likeliest tokens, and all
    others together.

    Args:
        client: of the orchestrator.
        tokenizer: of the drafter.
        say: called with a sentence about each loss.
        wait_seconds: how long a service that is away is waited for.

    Raises:
        StartupError: nothing answers, or it serves a target of another tokenizer.
    """

    tells_little = True

    def __init__(
        self,
        client: Client,
        tokenizer: Any,
        say: Say = lambda sentence: None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._client = client
        self._say, self._wait_seconds = say, wait_seconds
        self._lock, self._said_at = threading.Lock(), -math.inf
        self._leaving = threading.Event()
        try:
            about = self._client.info().target
        except CallFailed as error:
            raise StartupError(f"no target serves there: {error}") from None
        if about.tokenizer_fingerprint != vocabulary_fingerprint(tokenizer.get_vocab()):
            raise StartupError(
                "the target that is served has another tokenizer than the drafter: take a drafter"
                " of the same family"
            )
        self.vocabulary, self.ends = about.vocab_size, list(about.eos_token_ids)
        self._top = min(_MOST_TOP, self.vocabulary - 1)
        self._longest = about.max_length

    def rows(self, tokens: Tensor, last: int = 0, known: KnownTexts | None = None) -> TargetRows:
        """See `Teacher`. A served target has prefixes of its own.

        Raises:
            StartupError: the target refuses such texts.
            Unavailable: it was away for too long.
        """
        if tokens.shape[1] >= self._longest:
            raise StartupError(f"the target serves {self._longest} tokens: give a smaller length")
        told = self._ask(
            {"prompt": row.tolist(), "max_new_tokens": 1, "log_probs": self._top}
            | {"prompt_log_probs": True, "ignore_eos": True}
            for row in tokens
        )
        rows = [_tops(text.prompt[1:][-last:]) for text in told]
        return TargetRows(*(torch.stack(each) for each in zip(*rows, strict=True)))

    def continued(
        self, tokens: Tensor, known: Tensor, vocabulary: int, seed: int
    ) -> tuple[Tensor, TargetRows]:
        """See `Teacher`. Ids that the drafter does not know are not expected."""
        filled, time_ = tokens.clone(), tokens.shape[1]
        asked = [int(size) for size in known]
        told = self._ask(
            {"prompt": row[:size].tolist(), "max_new_tokens": time_ - size, "ignore_eos": True}
            | {"temperature": 1.0, "seed": seed + number, "log_probs": self._top}
            for number, (row, size) in enumerate(zip(tokens, asked, strict=True))
            if size < time_
        )
        texts = iter(told)
        said = _nothing_said(tokens, self._top)
        assert said.ids is not None
        for number, size in enumerate(asked):
            if size < time_:
                text = next(texts)
                filled[number, size:] = torch.tensor(text.token_ids)
                values, ids = _tops(text.tokens)
                said.log_probs[number, size - 1 :], said.ids[number, size - 1 :] = values, ids
        return filled.clamp(max=vocabulary - 1), said

    def _ask(self, requests: Any) -> Sequence[GeneratedText]:
        with ThreadPoolExecutor(_CALLS) as pool:
            try:
                return list(pool.map(lambda request: self._generate(**request), requests))
            except BaseException:  # else the pool waits for those that wait for the service
                self._leaving.set()
                raise

    def _say_once(self, sentence: str) -> None:
        """Of all calls that wait, and now and then while they do."""
        with self._lock:
            if time.monotonic() - self._said_at < _SAY_SECONDS:
                return
            self._said_at = time.monotonic()
        self._say(sentence)

    def _generate(self, **request: Any) -> GeneratedText:
        lost = None
        while True:
            try:
                return self._client.generate(**request)
            except (Lost, TimedOut) as error:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > self._wait_seconds:
                    raise Unavailable(
                        f"the target has been away for {self._wait_seconds:g} s ({error}); start"
                        " it, and the same command goes on"
                    ) from None
                self._say_once(f"the target is away ({error}); waiting")
                if self._leaving.wait(_PAUSE_SECONDS):
                    raise Unavailable("the run ends") from None
            except CallFailed as error:
                raise StartupError(f"the target does not say: {error}") from None


def _nothing_said(tokens: Tensor, top: int) -> TargetRows:
    """Rows of texts [rows, time + 1], to be filled."""
    shape = len(tokens), tokens.shape[1] - 1, top
    return TargetRows(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64))


def _tops(tokens: Sequence[GeneratedToken]) -> tuple[Tensor, Tensor]:
    """Logarithms and ids [tokens, k] of the likeliest tokens at each place."""
    values = torch.tensor([[value for _, value in token.top] for token in tokens])
    return values.float(), torch.tensor([[id_ for id_, _ in token.top] for token in tokens])
