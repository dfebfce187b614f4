"""Train Medusa's heads for the embedded target: `python -m models.zoo.medusa all`.

Medusa-1 (arXiv 2401.10774): the target is frozen, and its own output matrix is shared by all heads.
They learn the target's whole rows, and then the overlap with these itself.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from models import llama
from models.loop import Stage, train
from models.train import divergence, missed, scaled
from models.zoo import heads
from tandem.inference.heads.medusa import residual

HEADS, LAYERS = 4, 3
# A later token counts less (the paper's λ).
DEEPER = 0.8
STAGES = [
    Stage("divergence", steps=420, rows=8, length=256, start=0.5, end=0.35),
    Stage("overlap", steps=280, rows=8, length=256, start=0.35, end=0.0),
]


class MedusaBlocks(nn.Module):
    """The weights, under the names of the files."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))})
            for _ in range(HEADS)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # each head begins as the target's own row

    def forward(self, states: Tensor) -> Tensor:
        """[heads, n, width] from states [n, width]."""
        layers = [[block["layers"][i] for block in self.blocks] for i in range(LAYERS)]  # type: ignore[index]
        weights = [torch.stack([part.weight for part in row]).to(states.dtype) for row in layers]
        biases = [
            torch.stack([part.bias for part in row])[:, None].to(states.dtype) for row in layers
        ]
        return residual(states, weights, biases)


def fit(folder: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run."""
    teacher = heads.Teacher(folder)
    model = MedusaBlocks(llama.TARGET.hidden_size)
    table = teacher.weights["embed_tokens.weight"]
    compare = {"divergence": divergence, "overlap": missed}

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        features, wanted = teacher(tokens[:, :-1])
        found = model(features.flatten(0, 1)).view(HEADS, *features.shape)
        losses = [
            DEEPER**k
            * compare[stage.name](
                wanted[:, k + 1 :], F.linear(found[k, :, : -k - 1], table.to(found.dtype))
            )
            for k in range(HEADS)
        ]
        return torch.stack(losses).sum()

    seconds = train(
        model,
        scaled(STAGES, scale),
        heads.texts(folder, cache, scale),
        torch.compile(objective, dynamic=False),
        cache / "medusa.pt",
    )
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": HEADS,
        "medusa_num_layers": LAYERS,
        "num_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "hidden_size": llama.TARGET.hidden_size,
        "vocab_size": llama.TARGET.vocab_size,
        "truncated_vocab_size": llama.TARGET.vocab_size,
        "original_lm_head": True,
        "medusa_fc_bias": True,
        "tandem": heads.made_for(folder),
    }
    heads.save(output / "medusa", config, model.state_dict())
    print(f"Medusa's heads trained in {seconds / 60:.1f} min", flush=True)


@torch.inference_mode()
def report(folder: Path, output: Path) -> None:
    """Measure on the target's own texts; write acceptances into the head's configuration."""
    model = MedusaBlocks(llama.TARGET.hidden_size)
    model.load_state_dict(load_file(output / "medusa" / "model.safetensors"))
    teacher = heads.Teacher(folder)
    table = teacher.weights["embed_tokens.weight"]
    tokens = heads.own_texts(folder)
    first = 32
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(HEADS)]
    for chunk in torch.split(tokens, 4):
        features, wanted = teacher(chunk[:, :-1])
        p = wanted.float().softmax(-1)
        found = model(features.flatten(0, 1).float()).view(HEADS, *features.shape)
        for k in range(HEADS):
            q = F.linear(found[k, :, first : -k - 1], table).softmax(-1)
            parts[k].append((p[:, first + k + 1 :], q))
    heads.report(output / "medusa", parts)


def main() -> None:
    """Train, continuing an interrupted run, or measure the result."""
    heads.command("medusa", __doc__, fit, report)


if __name__ == "__main__":
    main()
