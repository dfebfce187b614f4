"""Train an adapter of the embedded target whose early exit drafts well:
`python -m models.zoo.layerskip all`.

LayerSkip (Elhoushi et al., arXiv 2404.16710): layer dropout, and a loss at the exits. Here it is a
low-rank change of all layers; the last layer is held to the rows of the target before.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models import evaluate, llama
from models.loop import Stage, train
from models.train import divergence, missed, scaled
from models.zoo.training import texts
from models.zoo.training.heads import own_texts
from models.zoo.training.low_rank import LowRank, adapted, held_out_loss
from models.zoo.training.script import run, write_figures

NAME = "layerskip"
EXIT = 3
STAGES = [
    Stage("divergence", steps=2400, rows=8, length=256, start=1.0, end=0.6),
    Stage("overlap", steps=1600, rows=8, length=256, start=0.6, end=0.0),
]
_COMPARE = {"divergence": divergence, "overlap": missed}
# Of a text in the last layer; less in those before (the paper's section 4.1.1).
_DROPOUT = 0.1
# The weight of the other exits, in turn (the paper's rotation); the served one is always trained.
_OTHERS = 0.2


def states_of(half: llama.Half, tokens: Tensor, kept: Tensor) -> list[Tensor]:
    """What the head reads after each layer [batch, time, width].

    Args:
        half: the weights.
        tokens: [batch, time].
        kept: [layers, batch] 1 where a text goes through the layer, else 0.
    """
    x, found = F.embedding(tokens, half.table), []
    for layer, own in zip(half.layers, kept, strict=True):
        seen = llama.norm(x, layer["first"])
        after = x + llama.attention(
            seen, layer["qkv"], layer["out"], llama.TARGET.num_attention_heads
        )
        after = llama.feed_forward(after, layer)
        x = torch.where(own[:, None, None] > 0, after, x)
        found.append(llama.norm(x, half.norm))
    return found


def dropped(tokens: Tensor) -> Tensor:
    """[layers, batch] which texts go through which layers: a function of the batch alone."""
    layers = llama.TARGET.num_hidden_layers
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    share = torch.tensor([math.exp(i * math.log(2) / (layers - 1)) - 1 for i in range(layers)])
    return (
        torch.rand(layers, len(tokens), generator=generator) >= _DROPOUT * share[:, None]
    ).float()


def fit(pair: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run, and write the adapter's folder."""
    base = texts.frozen(pair, "target")
    model, frozen = LowRank(base), llama.Half(base, llama.TARGET)
    layers = llama.TARGET.num_hidden_layers
    everything = torch.ones(layers, 1)

    @torch.compile(dynamic=False)
    def losses(stage: str, tokens: Tensor, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        half = llama.Half(model.weights(), llama.TARGET)
        table = half.table
        with torch.no_grad():
            before = states_of(frozen, tokens, everything.expand(-1, len(tokens)))[-1]
            wanted = F.linear(before, table).float()
        rows = [F.linear(states, table).float() for states in states_of(half, tokens, kept)]
        compare = _COMPARE[stage]
        last = divergence(wanted, rows[-1])
        # An exit learns the rows of the last layer as they are now.
        return last, [compare(rows[-1].detach(), own) for own in rows[:-1]]

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        read = tokens[:, :-1]
        last, exits = losses(stage.name, read, dropped(tokens))
        other = int(tokens.sum()) % (layers - 1)
        return last + exits[EXIT - 1] + (_OTHERS * exits[other] if other != EXIT - 1 else 0.0)

    seconds = train(
        model,
        scaled(list(STAGES), scale),
        texts.mixed(pair, cache, scale),
        objective,
        cache / f"{NAME}.pt",
        model.optimizers(),
    )
    model.publish(output / NAME, pair, {"exit": EXIT})
    print(f"{NAME} trained in {seconds / 60:.1f} min", flush=True)


@torch.inference_mode()
def report(pair: Path, output: Path) -> None:
    """Measure the exits before and after, on texts of the target; write the figures."""
    chunks = torch.split(own_texts(pair), 8)
    figures: dict[str, Any] = {}
    for name, weights in (
        ("before", texts.frozen(pair, "target")),
        ("after", adapted(pair, output / NAME)),
    ):
        half = llama.Half(weights, llama.TARGET)
        overlaps: list[list[Tensor]] = [[] for _ in half.layers]
        for chunk in chunks:
            kept = torch.ones(len(half.layers), len(chunk))
            rows = [
                F.linear(states[:, evaluate.PROMPT :], half.table).float().softmax(-1)
                for states in states_of(half, chunk[:, :-1], kept)
            ]
            for own, row in zip(overlaps, rows, strict=True):
                own.append(torch.minimum(row, rows[-1]).sum(-1))
        figures[name] = {
            "overlap_by_exit": [
                evaluate.mean_and_error(torch.cat(own).double().numpy()) for own in overlaps[:-1]
            ],
            "held_out_loss": held_out_loss(pair, weights),
        }
    write_figures(output, NAME, figures)


if __name__ == "__main__":
    run(NAME, __doc__, fit, report)
