"""Train multi-token prediction for the embedded target: `python -m models.zoo.heads.mtp all`.

Multi-token prediction (Gloeckle et al., arXiv 2404.19737): a decoder layer for each depth, over all
hidden states of the target. Here the target is frozen. Medusa's recipe serves it.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from models import llama
from models.loop import Stage
from models.zoo.training.heads import Training, command

HEADS = 4
LAYER = llama.config(layers=1, width=llama.TARGET.hidden_size, inner=960, heads=5)
STAGES = [
    Stage("divergence", steps=600, rows=8, length=256, start=0.5, end=0.4),
    Stage("overlap", steps=400, rows=8, length=256, start=0.4, end=0.0),
]


class MtpLayers(nn.Module):
    """The weights; the layers' names within a block are those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(LlamaDecoderLayer(LAYER, 0) for _ in range(HEADS))
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # each head begins as the target's own row
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """See `Training`; no head knows a token."""
        heads = LAYER.num_attention_heads
        return [llama.decoder_layer(block, features, heads) for block in self.blocks[:depths]]


def training() -> Training:
    """Of four heads."""
    config = {
        "model_type": "medusa",
        "medusa_num_heads": HEADS,
        "medusa_num_layers": 1,
        "layer_config": LAYER.to_dict(),
    }
    return Training("mtp", MtpLayers(), STAGES, HEADS, HEADS, config)


if __name__ == "__main__":
    command("mtp", __doc__, training)
