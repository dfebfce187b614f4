"""Look-ahead rows of the embedded target: what PaSS and SPACE train, publish and measure.

After a text's token hang K rows whose embeddings are learned and name no token. The row of the
first is a guess of the distribution of the token after the next one, and so on. At any time, with
any prefix, the target's own rows there are what is learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import evaluate, llama
from models.loop import Stage, train
from models.train import divergence, missed, scaled
from models.zoo.training import groups, texts
from models.zoo.training.heads import made_for, own_texts
from models.zoo.training.low_rank import LowRank, adapted, held_out_loss
from models.zoo.training.script import run, write_figures
from tandem.inference.loading.adapter import adapter_fingerprint
from tandem.inference.loading.extra_embeddings import (
    MadeFor,
    read_extra_embeddings,
    write_extra_embeddings,
)

ROWS = 4
_PLACES = 32
_RATE = 3e-3
_COMPARE = {"divergence": divergence, "overlap": missed}


@dataclass(frozen=True)
class Training:
    """How look-ahead rows are trained.

    Attributes:
        name: of their folder.
        stages: of a run.
        adapts: whether the target learns too, by a low-rank adapter.
    """

    name: str
    stages: Sequence[Stage]
    adapts: bool


class Masks(nn.Module):
    """The rows, and the target that computes them.

    Args:
        base: the target's weights, by short name.
        adapts: whether it learns too.
    """

    def __init__(self, base: llama.Weights, adapts: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        table = base["embed_tokens.weight"]
        noise = torch.randn(ROWS, table.shape[1]) * table.std() / 4
        self.rows = nn.Parameter(table.mean(0) + noise)
        self.change = LowRank(base) if adapts else None
        self._base = base

    def weights(self) -> llama.Weights:
        """Of the target that computes the rows, by short name."""
        return self.change.weights() if self.change else self._base

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for the rows, and one for the adapter."""
        own = torch.optim.AdamW([self.rows], lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        return [own, *(self.change.optimizers() if self.change else [])]


def fit(training: Training, pair: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run, and write the folder."""
    base = texts.frozen(pair, "target")
    model, frozen = Masks(base, training.adapts), llama.Half(base, llama.TARGET)

    @torch.compile(dynamic=False)
    def losses(stage: str, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        half = llama.Half(model.weights(), llama.TARGET)
        hung = model.rows.to(half.table.dtype).expand(len(tokens), _PLACES, -1, -1)
        states, guesses = groups.states_of(half, F.embedding(tokens, half.table), hung, anchors)
        own = F.linear(states, half.table).float()
        wanted = groups.following(own, anchors, ROWS).detach()
        ahead = _COMPARE[stage](wanted, F.linear(guesses, half.table).float())
        if not training.adapts:
            return ahead, ahead.new_zeros(())
        with torch.no_grad():
            before = F.linear(llama.features(frozen, tokens, llama.TARGET), half.table).float()
        return ahead, divergence(before, own)

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        anchors = groups.anchors_of(stage, tokens, _PLACES, ROWS)
        ahead, kept = losses(stage.name, tokens[:, :-1], anchors)
        return ahead + kept

    seconds = train(
        model,
        scaled(list(training.stages), scale),
        texts.mixed(pair, cache, scale),
        objective,
        cache / f"{training.name}.pt",
        model.optimizers(),
    )
    publish(model, pair, output / training.name)
    print(f"{training.name} trained in {seconds / 60:.1f} min", flush=True)


def publish(model: Masks, pair: Path, folder: Path) -> None:
    """Write the rows, and the adapter of the target that they are for, if it learnt too."""
    if model.change:
        model.change.publish(folder, pair, {"rows": ROWS})
    folder.mkdir(parents=True, exist_ok=True)
    adapter = adapter_fingerprint(str(folder) if model.change else "")
    weights = str(made_for(pair)["made_for"])
    write_extra_embeddings(folder, model.rows, MadeFor(weights, adapter))


@torch.inference_mode()
def report(training: Training, pair: Path, output: Path) -> None:
    """Measure the rows on texts of the target, each after every place; write the figures."""
    folder = output / training.name
    weights = adapted(pair, folder) if training.adapts else texts.frozen(pair, "target")
    half = llama.Half(weights, llama.TARGET)
    rows, _ = read_extra_embeddings(str(folder))
    rows = rows.to(half.table.dtype)
    overlaps: list[list[Tensor]] = [[] for _ in range(ROWS)]
    for chunk in torch.split(own_texts(pair), 8):
        tokens = chunk[:, :-1]
        anchors = torch.arange(evaluate.PROMPT, tokens.shape[1] - ROWS - 1)
        hung = rows.expand(len(tokens), len(anchors), -1, -1)
        states, guesses = groups.states_of(half, F.embedding(tokens, half.table), hung, anchors)
        own = groups.following(F.linear(states, half.table).float().softmax(-1), anchors, ROWS)
        guessed = F.linear(guesses, half.table).float().softmax(-1)
        for depth, found in enumerate(torch.minimum(own, guessed).sum(-1).unbind(-1)):
            overlaps[depth].append(found)
    figures: dict[str, Any] = {
        "overlap_by_row": [
            evaluate.mean_and_error(torch.cat(own).double().numpy()) for own in overlaps
        ]
    }
    if training.adapts:
        figures["held_out_loss"] = {
            "before": held_out_loss(pair, texts.frozen(pair, "target")),
            "after": held_out_loss(pair, weights),
        }
    write_figures(output, training.name, figures)


def main(training: Training, doc: str | None) -> None:
    """The command of a script."""
    run(training.name, doc, partial(fit, training), partial(report, training))
