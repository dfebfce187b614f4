"""Train an adapter of the embedded target for texts of up to 8,192 tokens:
`python -m models.zoo.long all`.

The target learnt from windows of 256 tokens, and knows no position far beyond them. This is a
low-rank change of all layers, learnt from ever longer windows of the corpus, whose files follow
each other by their folders, so that much of what comes was said before. It is what TriForce (Sun et
al., arXiv 2404.11912) needs of a target: attention that looks far back.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models import corpus, llama
from models.loop import Stage, train, windows
from models.train import scaled
from models.zoo.training import texts
from models.zoo.training.low_rank import LowRank, adapted
from models.zoo.training.script import run, write_figures

NAME = "long"
STAGES = [
    Stage("1,024", steps=240, rows=4, length=1024, start=1.0, end=0.7),
    Stage("4,096", steps=120, rows=1, length=4096, start=0.7, end=0.4),
    Stage("8,192", steps=70, rows=1, length=8191, start=0.4, end=0.0),
]
# Of held-out text: windows, and where their losses are told apart.
_WINDOWS, _BOUNDS = 6, (0, 256, 1024, 2048, 4096, 8190)


def losses(half: llama.Half, tokens: Tensor) -> Tensor:
    """[batch, time] loss of each token after the first."""
    read = tokens[:, :-1]
    heads = llama.TARGET.num_attention_heads
    x = F.embedding(read, half.table)
    for layer in half.layers:
        x = x + _attention(llama.norm(x, layer["first"]), layer["qkv"], layer["out"], heads)
        x = llama.feed_forward(x, layer)
    rows = F.linear(llama.norm(x, half.norm), half.table).float()
    return F.cross_entropy(rows.transpose(1, 2), tokens[:, 1:], reduction="none")


def _attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    """As `llama.attention`, whose scores of all pairs would not fit into memory."""
    batch, time, width = x.shape
    cos, sin = llama.angles(time, width // heads)
    q, k, v = F.linear(x, qkv).view(batch, time, 3, heads, -1).unbind(2)
    q, k = llama.rotate(q, cos, sin), llama.rotate(k, cos, sin)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(seen.transpose(1, 2).reshape(batch, time, width), out)


def fit(pair: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run, and write the adapter's folder."""
    model = LowRank(texts.frozen(pair, "target"))
    text = texts.stream(pair, cache)

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        return losses(llama.Half(model.weights(), llama.TARGET), tokens).mean()

    seconds = train(
        model,
        scaled(list(STAGES), scale),
        lambda stage, step: windows(text, stage, step),
        objective,
        cache / f"{NAME}.pt",
        model.optimizers(),
    )
    model.publish(output / NAME, pair, {"longest": llama.POSITIONS})
    print(f"{NAME} trained in {seconds / 60:.1f} min", flush=True)


@torch.inference_mode()
def report(pair: Path, output: Path) -> None:
    """Measure the loss by the place in a text of the held-out corpus, before and after."""
    held_out = [text for name, text in corpus.sources() if corpus.held_out(name)]
    stream = corpus.encode(texts.tokenizer_of(pair), held_out)
    whole = Stage("held out", steps=1, rows=_WINDOWS, length=8191, start=0, end=0)
    tokens = windows(stream, whole, 0)
    figures: dict[str, Any] = {"windows": len(tokens)}
    for name, weights in (
        ("before", texts.frozen(pair, "target")),
        ("after", adapted(pair, output / NAME)),
    ):
        half = llama.Half(weights, llama.TARGET)
        lost = torch.cat([losses(half, row[None]) for row in tokens])
        figures[name] = {
            f"{first} to {last}": round(float(lost[:, first:last].mean()), 4)
            for first, last in pairwise(_BOUNDS)
        }
    write_figures(output, NAME, figures)


if __name__ == "__main__":
    run(NAME, __doc__, fit, report)
