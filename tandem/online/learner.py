"""What is trained, and how it is measured: a decoder on texts of its traffic and on home texts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from tandem.whole_files import writing

# Tokens of a window that is learnt from, and texts of a step: of the traffic, and of home.
LENGTH = 256
TEXTS, _HOME_TEXTS = 6, 2
_DIVERGENCE = "tvd"
_RATE = 1e-3
# Texts of each kind that are measured on.
MOST_HELD_OUT = 64
# In the place of tokens that a row does not tell: an id that no drafter knows.
_NO_TOKEN = np.iinfo(np.int32).max
_UNTOLD = -16.0


@dataclass(frozen=True, slots=True)
class Windows:
    """Parts of texts with the target's rows.

    Attributes:
        tokens: [rows, time + 1] int64, zero behind a text's end.
        at: [m, 2] of int64: row and place of each of the target's rows.
        said: [m, TOP] the target's rows.
        following: [m] int64, the token that came.
    """

    tokens: Tensor
    at: Tensor
    said: TargetRows
    following: Tensor


def windows_of(texts: Sequence[KeptText], generator: np.random.Generator) -> Windows:
    """A window of each text, around one of its rows."""
    tokens = np.zeros((len(texts), LENGTH + 1), np.int64)
    at, ids, weights, following = [], [], [], []
    for number, text in enumerate(texts):
        end = len(text.token_ids)
        about = int(generator.choice(text.places))
        begin = min(max(0, about - int(generator.integers(LENGTH))), max(0, end - LENGTH - 1))
        part = text.token_ids[begin : begin + LENGTH + 1]
        tokens[number, : len(part)] = part
        inside = (text.places >= begin) & (text.places < begin + len(part) - 1)
        places = text.places[inside].astype(np.int64)
        at.append(np.stack([np.full(len(places), number), places - begin], 1))
        told = text.weights[inside] > 0
        ids.append(np.where(told, text.ids[inside], _NO_TOKEN))
        weights.append(text.weights[inside])
        following.append(text.token_ids[places + 1])
    shares = torch.from_numpy(np.concatenate(weights).astype(np.float32))
    said = (shares / shares.sum(1, keepdim=True)).log().clamp(min=_UNTOLD)
    rows = TargetRows(said, torch.from_numpy(np.concatenate(ids).astype(np.int64)))
    return Windows(
        torch.from_numpy(tokens),
        torch.from_numpy(np.concatenate(at)),
        rows,
        torch.from_numpy(np.concatenate(following).astype(np.int64)),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of weights on texts that they did not learn from.

    Attributes:
        overlap: of each text, the mean of Σ min(p, q) with the target's rows.
        surprise: of each text, the mean of −log q of the tokens that came, in nats.
        home: mean of Σ min(p, q) with the first weights' rows on home texts.
    """

    overlap: npt.NDArray[np.float64]
    surprise: npt.NDArray[np.float64]
    home: float


class Learner:
    """A decoder in training, beside the one that it began as.

    Args:
        model: with the weights that are served, float32, on the CPU.
        first: the same with those of the checkpoint.
        home: [n, LENGTH + 1] int64, texts that it must not forget; the first half is learnt from,
            the other measured on.
    """

    def __init__(self, model: Any, first: Any, home: Tensor) -> None:
        self.model, self._first = model, first
        self._at_once = rows_at_once(LENGTH, model.config.get_text_config().vocab_size)
        self._served = copy.deepcopy(model.state_dict())
        half = len(home) // 2
        self._home, self._home_held_out = home[:half], home[half:]
        for parameter in first.parameters():
            parameter.requires_grad_(False)
        self.begin_again()

    def begin_again(self) -> None:
        """Go back to the weights that are served."""
        self.model.load_state_dict(self._served)
        self._training = Training(
            self.model, optimisers(self.model, _RATE), Path(), _RATE, lambda step, seconds: 0.0
        )

    @property
    def steps(self) -> int:
        """Since it last began."""
        return self._training.step

    def step(self, texts: Sequence[KeptText], generator: np.random.Generator) -> float:
        """Learn from texts, and from home texts; the loss.

        Raises:
            EngineFailure: it is not finite; the weights are as before.
        """
        home = self._home[torch.from_numpy(generator.permutation(len(self._home))[:_HOME_TEXTS])]
        return self._training.take(lambda: self._losses(texts, home, generator))

    def _losses(self, texts: Sequence[KeptText], home: Tensor, generator: Any) -> Iterator[Tensor]:
        """Parts of the mean over the texts' rows, and over home texts' places, each with its share;
        as many texts at once as memory is planned for."""
        windows = [
            windows_of(texts[at : at + self._at_once], generator)
            for at in range(0, len(texts), self._at_once)
        ]
        rows = sum(len(each.at) for each in windows)
        share = len(texts) / (len(texts) + len(home))
        for each in windows:
            own = self._rows(self.model, each)
            found = loss(_DIVERGENCE, own, each.said, each.following).sum()
            yield found * share / rows
        for part in torch.split(home, self._at_once):
            with torch.no_grad():
                first = self._first(input_ids=part[:, :-1], use_cache=False).logits.log_softmax(-1)
            own = self.model(input_ids=part[:, :-1], use_cache=False).logits
            each_loss = loss(_DIVERGENCE, own, TargetRows(first), part[:, 1:])
            yield each_loss.sum() * (1 - share) / part[:, 1:].numel() * len(part) / len(home)

    def _rows(self, model: Any, windows: Windows) -> Tensor:
        """[m, V] logits where the target's rows are."""
        hidden = model(input_ids=windows.tokens[:, :-1], use_cache=False).logits
        rows: Tensor = hidden[windows.at[:, 0], windows.at[:, 1]]
        return rows

    @torch.no_grad()
    def measured(self, texts: Sequence[KeptText], *, served: bool = False) -> Measured:
        """Figures on texts that are held out, at least one, and on home texts.

        Args:
            texts: at most `MOST_HELD_OUT`.
            served: of the weights that are served, and not of those in training.
        """
        if served:
            trained = copy.deepcopy(self.model.state_dict())
            self.model.load_state_dict(self._served)
        overlap: list[float] = []
        surprise: list[float] = []
        for begin in range(0, len(texts), self._at_once):
            part = texts[begin : begin + self._at_once]
            windows = windows_of(part, np.random.default_rng(0))
            logits = self._rows(self.model, windows)
            shared = 1 - tvd(*windows.said.beside(logits))
            missed = F.cross_entropy(logits, windows.following, reduction="none")
            for number in range(len(part)):
                own = windows.at[:, 0] == number
                overlap.append(float(shared[own].mean()))
                surprise.append(float(missed[own].mean()))
        home = float(torch.stack([self._at_home(part) for part in self._home_held_out]).mean())
        if served:
            self.model.load_state_dict(trained)
        return Measured(np.array(overlap), np.array(surprise), home)

    def _at_home(self, text: Tensor) -> Tensor:
        rows = [
            model(input_ids=text[None, :-1], use_cache=False).logits.log_softmax(-1)
            for model in (self._first, self.model)
        ]
        return (1 - tvd(*rows)).mean()

    def write(self, path: Path) -> None:
        """The weights in training, float32, to a file that is whole or not there.

        Raises:
            OSError: there is no room.
        """
        weights = {name: each.detach().contiguous() for name, each in self.model.named_parameters()}
        with writing(path) as fresh:
            save_file(weights, fresh)

    def serve(self) -> None:
        """What is in training is served from now on."""
        self._served = copy.deepcopy(self.model.state_dict())
