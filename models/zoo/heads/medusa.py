"""Train Medusa's heads for the embedded target: `python -m models.zoo.heads.medusa all`.

Medusa-1 (arXiv 2401.10774): the target is frozen, and its own output matrix is shared by all heads.
They learn the target's whole rows, and then the overlap with these itself.
"""

import torch
from torch import Tensor, nn

from models import llama
from models.loop import Stage
from models.zoo.training.heads import Training, command
from tandem.inference.heads.medusa import MedusaWeights

HEADS, LAYERS = 4, 3
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

    def forward(self, tokens: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """See `Training`; no head knows a token."""
        layers = [[block["layers"][i] for block in self.blocks] for i in range(LAYERS)]  # type: ignore[index]
        weights = [torch.stack([part.weight for part in row]) for row in layers]
        biases = [torch.stack([part.bias for part in row])[:, None] for row in layers]
        found = MedusaWeights(weights, biases).guesses(features.flatten(0, 1), depths)
        return list(found.view(depths, *features.shape))


def training() -> Training:
    """Of four heads."""
    width, vocabulary = llama.TARGET.hidden_size, llama.TARGET.vocab_size
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": HEADS,
        "medusa_num_layers": LAYERS,
        "num_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "hidden_size": width,
        "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary,
        "original_lm_head": True,
        "medusa_fc_bias": True,
    }
    return Training("medusa", MedusaBlocks(width), STAGES, HEADS, HEADS, config)


if __name__ == "__main__":
    command("medusa", __doc__, training)
