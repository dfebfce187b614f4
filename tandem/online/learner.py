"""What is trained, and how it is measured: a decoder on texts of its traffic and on home texts.

Heads have a learner of their own, see `tandem.online.heads.learner`."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tandem.distillation.divergences import TargetRows, loss, tvd
from tandem.distillation.held_out import rows_at_once
from tandem.distillation.trainer import Training, optimisers
from tandem.online.kept_text import KeptText
from tandem.speculation.feedback import WHOLE_MASS
from tandem.whole_files import writing

# Tokens of a window that is learnt from, and texts of a step: of the traffic, and of home.
LENGTH = 256
TEXTS, HOME_TEXTS = 12, 3
_DIVERGENCE = "tvd"
_RATE = 6e-4
# What a step leaves of the running mean; less for the first steps, which are soon forgotten.
_MEAN, _FIRST_STEPS = 0.98, 5
# Texts of each kind that are measured on.
MOST_HELD_OUT = 64
# In the place of tokens that a row does not tell: an id that no drafter knows.
_NO_TOKEN = np.iinfo(np.int32).max
# Logarithm of their probability.
_UNTOLD = -16.0
# The least share of a row's probability that is taken to be told.
_LEAST_TOLD = 0.1


@dataclass(frozen=True, slots=True)
class ToldRows:
    """Rows of a target as they are kept.

    Attributes:
        said: [m, TOP]; where their mass is not known, as if it were 1.
        known: [m] bool, where it is.
    """

    said: TargetRows
    known: Tensor

    def surprise(self, following: Tensor) -> Tensor:
        """[m] −log p of the tokens [m] that came, among those that the rows tell, in nats; infinite
        where a row does not tell that token."""
        assert self.said.ids is not None
        told = self.said.ids == following[:, None]
        # Not by the mass: a drafter that is surer of these tokens would seem to know more.
        said = self.said.log_probs.log_softmax(-1)
        return -torch.where(told, said, -torch.inf).amax(-1)

    def with_rest(self, logits: Callable[[], Tensor]) -> TargetRows:
        """Rows that say their mass. Where the target does not say it, other tokens get what the
        other rows leave to them: with nothing there a drafter would learn to be too sure of the
        tokens that they tell.

        Args:
            logits: [m, V] of the other rows, computed where they are needed.
        """
        said = self.said
        if self.known.all():
            return said
        assert said.ids is not None
        own = logits().log_softmax(-1)
        unknown = said.ids >= own.shape[-1]
        told = own.gather(-1, said.ids.masked_fill(unknown, 0)).exp()
        share = told.masked_fill(unknown, 0).sum(-1, keepdim=True).clamp(_LEAST_TOLD, 1)
        share = torch.where(self.known[:, None], 1, share)
        return TargetRows(said.log_probs + share.log(), said.ids)


def told_rows(
    ids: npt.NDArray[np.uint32], weights: npt.NDArray[np.uint16], masses: npt.NDArray[np.uint16]
) -> ToldRows:
    """Rows [m, TOP] of `KeptText`."""
    named = torch.from_numpy(np.where(weights > 0, ids.astype(np.int64), _NO_TOKEN))
    shares = torch.from_numpy(weights.astype(np.float32))
    mass = torch.from_numpy(masses.astype(np.float32)) / WHOLE_MASS
    known = mass > 0
    shares *= torch.where(known, mass, 1)[:, None] / shares.sum(1, keepdim=True)
    return ToldRows(TargetRows(shares.log().clamp(min=_UNTOLD), named), known)


@dataclass(frozen=True, slots=True)
class Windows:
    """Parts of texts with the target's rows.

    Attributes:
        tokens: [rows, time + 1] int64, zero after a text's end.
        at: [m, 2] of int64: row and place of each of the target's rows.
        told: [m] the target's rows.
        following: [m] int64, the token that came.
    """

    tokens: Tensor
    at: Tensor
    told: ToldRows
    following: Tensor


def windows_of(
    texts: Sequence[KeptText], vocabulary: int, length: int, generator: np.random.Generator
) -> Windows:
    """A window of each text, around one of its rows.

    Args:
        texts: at least one.
        vocabulary: ids that the drafter has. Its target may have more: they are read as the last
            one, as while it drafts, and no row before one is learnt from.
        length: of a window, in tokens.
        generator: chooses.
    """
    tokens = np.zeros((len(texts), length + 1), np.int64)
    at, ids, weights, masses, following = [], [], [], [], []
    for number, text in enumerate(texts):
        end = len(text.token_ids)
        about = int(generator.choice(text.places))
        begin = min(max(0, about - int(generator.integers(length))), max(0, end - length - 1))
        part = text.token_ids[begin : begin + length + 1]
        tokens[number, : len(part)] = np.minimum(part, vocabulary - 1)
        inside = (text.places >= begin) & (text.places < begin + len(part) - 1)
        inside &= text.token_ids[text.places + 1] < vocabulary
        places = text.places[inside].astype(np.int64)
        at.append(np.stack([np.full(len(places), number), places - begin], 1))
        ids.append(text.ids[inside])
        weights.append(text.weights[inside])
        masses.append(text.masses[inside])
        following.append(text.token_ids[places + 1])
    return Windows(
        torch.from_numpy(tokens),
        torch.from_numpy(np.concatenate(at)),
        told_rows(np.concatenate(ids), np.concatenate(weights), np.concatenate(masses)),
        torch.from_numpy(np.concatenate(following).astype(np.int64)),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of weights on texts that they did not learn from.

    Attributes:
        overlap: of each text, the mean of Σ min(p, q) with the target's rows.
        unsaid: of each text, the mean of log q − log p of the tokens that came, in nats, with the
            target's rows as p; of those tokens that rows tell, and 0 for none.
    """

    overlap: npt.NDArray[np.float64]
    unsaid: npt.NDArray[np.float64]


class WeightsInTraining(ABC):
    """Weights in training, beside those that are served and those that they began as.

    What is measured and served is the running mean of the weights in training, which is nearer to
    the target than they are themselves: a few texts a step are noise.

    Attributes:
        model: in training.
        steps: that were taken.

    Args:
        model: with the weights that are served, float32, on the CPU.
        first: the same with those of the checkpoint.
        rest: is called between two passes.
    """

    # The largest learning rate.
    rate = _RATE

    def __init__(self, model: Any, first: Any, rest: Callable[[], None]) -> None:
        self.model, self._first, self._rest = model, first, rest
        self._served, self._mean = copy.deepcopy(model), copy.deepcopy(model)
        for parameter in (
            p for each in (first, self._served, self._mean) for p in each.parameters()
        ):
            parameter.requires_grad_(False)
        self.steps = 0
        self.begin_again()

    def begin_again(self) -> None:
        """Go back to the weights that are served."""
        for each in (self.model, self._mean):
            each.load_state_dict(self._served.state_dict())
        self._training = Training(
            self.model,
            optimisers(self.model, self.rate),
            Path(),
            self.rate,
            lambda step, seconds: 0.0,
        )

    def step(self, texts: Sequence[KeptText], generator: np.random.Generator) -> float:
        """Learn from texts, and from home texts; the loss.

        Raises:
            EngineFailure: it is not finite; the weights are as before.
        """
        found = self._training.take(lambda: self._losses(texts, generator))
        self.steps += 1
        # The first steps are forgotten sooner.
        share = max(1 - _MEAN, _FIRST_STEPS / (self._training.step + _FIRST_STEPS))
        with torch.no_grad():
            for mean, own in zip(self._mean.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(own, share)
        return found

    @abstractmethod
    def _losses(self, texts: Sequence[KeptText], generator: Any) -> Iterator[Tensor]:
        """Parts of a step's loss, each with its graph."""

    @abstractmethod
    def measured(self, texts: Sequence[KeptText], *, served: bool = False) -> Measured:
        """Figures on texts that are held out, at least one.

        Args:
            texts: at most `MOST_HELD_OUT`.
            served: of the weights that are served, and not of those that were trained.
        """

    @abstractmethod
    def at_home(self) -> float:
        """By how many nats a token of home texts that are held out is less likely than with the
        first weights, at the mean."""

    def write(self, path: Path) -> None:
        """The trained weights, float32, to a file that is whole or not there.

        Raises:
            OSError: there is no room.
        """
        weights = {name: each.detach().contiguous() for name, each in self._mean.named_parameters()}
        with writing(path) as fresh:
            save_file(weights, fresh)

    def serve(self) -> None:
        """What was trained is served from now on."""
        self._served.load_state_dict(self._mean.state_dict())


class Learner(WeightsInTraining):
    """A decoder in training.

    Args:
        model: see `WeightsInTraining`.
        first: see there.
        home: [n, length + 1] int64, texts that it must not forget; the first half is learnt from,
            the other measured on.
        rest: see there.
    """

    def __init__(
        self, model: Any, first: Any, home: Tensor, rest: Callable[[], None] = lambda: None
    ) -> None:
        self._vocabulary = model.config.get_text_config().vocab_size
        self._length = home.shape[1] - 1
        self._at_once = rows_at_once(self._length, self._vocabulary)
        half = len(home) // 2
        self._home, self._home_held_out = home[:half], home[half:]
        super().__init__(model, first, rest)

    def _losses(self, texts: Sequence[KeptText], generator: Any) -> Iterator[Tensor]:
        """Parts of the mean over the texts' rows, and over home texts' places, each with its share;
        as many texts at once as memory is planned for."""
        home = self._home[torch.from_numpy(generator.permutation(len(self._home))[:HOME_TEXTS])]
        windows = [self._windows(part, generator) for part in self._parts(texts)]
        rows = sum(len(each.at) for each in windows)
        share = len(texts) / (len(texts) + len(home))
        for each in windows:
            said = self._with_rest(each)
            own = self._rows(self.model, each)
            yield loss(_DIVERGENCE, own, said, each.following).sum() * share / max(rows, 1)
            self._rest()
        places = home[:, 1:].numel()
        for part in torch.split(home, self._at_once):
            with torch.no_grad():
                first = TargetRows(_log_rows(self._first, part))
            own = self.model(input_ids=part[:, :-1], use_cache=False).logits
            yield loss(_DIVERGENCE, own, first, part[:, 1:]).sum() * (1 - share) / places
            self._rest()

    def _parts(self, texts: Sequence[KeptText]) -> Iterator[Sequence[KeptText]]:
        for begin in range(0, len(texts), self._at_once):
            yield texts[begin : begin + self._at_once]

    def _windows(self, texts: Sequence[KeptText], generator: np.random.Generator) -> Windows:
        return windows_of(texts, self._vocabulary, self._length, generator)

    def _rows(self, model: Any, windows: Windows) -> Tensor:
        """[m, V] logits where the target's rows are."""
        logits = model(input_ids=windows.tokens[:, :-1], use_cache=False).logits
        rows: Tensor = logits[windows.at[:, 0], windows.at[:, 1]]
        return rows

    @torch.no_grad()
    def _with_rest(self, windows: Windows) -> TargetRows:
        """The target's rows; what they do not say is that of the checkpoint's weights."""
        return windows.told.with_rest(lambda: self._rows(self._first, windows))

    def measured(self, texts: Sequence[KeptText], *, served: bool = False) -> Measured:
        """See `WeightsInTraining`."""
        model = self._served if served else self._mean
        found: list[tuple[float, float]] = []
        for part in self._parts(texts):
            windows = self._windows(part, np.random.default_rng(0))
            with torch.no_grad():
                logits = self._rows(model, windows)
                shared = 1 - tvd(*self._with_rest(windows).beside(logits))
                came = F.cross_entropy(logits, windows.following, reduction="none")
            said = windows.told.surprise(windows.following)
            for number in range(len(part)):
                own = windows.at[:, 0] == number
                told = own & said.isfinite()
                if own.any():
                    unsaid = (said - came)[told].mean() if told.any() else 0.0
                    found.append((float(shared[own].mean()), float(unsaid)))
            self._rest()
        return Measured(*np.array(found).T)

    def at_home(self) -> float:
        """See `WeightsInTraining`."""
        found = []
        for text in self._home_held_out:
            with torch.no_grad():
                first, own = (_surprise(model, text[None]) for model in (self._first, self._mean))
            found.append(own - first)
            self._rest()
        return fmean(found)


def _log_rows(model: Any, tokens: Tensor) -> Tensor:
    """[rows, time, V] logarithms after each token but the last."""
    rows: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)
    return rows


def _surprise(model: Any, tokens: Tensor) -> float:
    """The mean of −log q of tokens, in nats."""
    rows = _log_rows(model, tokens)
    return float(F.nll_loss(rows.flatten(0, 1), tokens[:, 1:].flatten()))
