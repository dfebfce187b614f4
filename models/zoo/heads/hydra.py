"""Train Hydra's heads for the embedded target: `python -m models.zoo.heads.hydra all [--plus]`.

Hydra (arXiv 2402.05109): a head reads the target's hidden state and the embeddings of the tokens on
the path. With `--plus` a decoder layer over all hidden states comes first (Hydra++). The loss is
the target's whole row, as in the paper's teacher loss. The target's output matrix is shared.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaModel

from models import llama
from models.loop import Stage
from models.zoo.training.heads import Training, command
from tandem.inference.heads.hydra import HydraBlock, guess

HEADS = 3
WIDTH = llama.TARGET.hidden_size
PREFIX = llama.config(layers=1, width=WIDTH, inner=960, heads=5)
STAGES = [
    Stage("divergence", steps=600, rows=8, length=256, start=0.5, end=0.4),
    Stage("overlap", steps=400, rows=8, length=256, start=0.4, end=0.0),
]


class HydraHeads(nn.Module):
    """The weights, under the names of the authors' files."""

    def __init__(self, plus: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hydra_mlp = nn.ModuleList(
            nn.ModuleDict(
                {
                    "1": nn.ModuleDict(
                        {
                            "linear": nn.Linear((2 + k) * WIDTH, WIDTH),
                            "res_connection": nn.Linear((2 + k) * WIDTH, WIDTH),
                        }
                    ),
                    "3": nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH)}),
                }
            )
            for k in range(HEADS)
        )
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter)
            if "res_connection.weight" in name:  # each head begins as the target's own row
                with torch.no_grad():
                    parameter[:, :WIDTH] = torch.eye(WIDTH)
        self.prefix_embeding_layer = None
        if plus:
            prefix = LlamaModel(PREFIX)
            del prefix.embed_tokens
            for parameter in (prefix.layers[0].self_attn.o_proj, prefix.layers[0].mlp.down_proj):
                nn.init.zeros_(parameter.weight)
            self.prefix_embeding_layer = prefix

    def _prefixed(self, features: Tensor) -> Tensor:
        """What a prefix layer makes of features [rows, time, width]."""
        if self.prefix_embeding_layer is None:
            return features
        prefix: Any = self.prefix_embeding_layer
        x = llama.decoder_layer(prefix.layers[0], features, PREFIX.num_attention_heads)
        return llama.norm(x, prefix.norm.weight)

    def forward(self, tokens: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """See `Training`; a root has all the tokens that a head reads."""
        time, found = features.shape[1], []
        read = self._prefixed(features)
        for k, block in enumerate(self.hydra_mlp):
            roots = time - k
            path = [tokens[:, 1 + i : 1 + i + roots] for i in range(k + 1)]
            x = torch.cat([read[:, :roots], *path], -1)
            found.append(guess([_served(part) for part in block.values()], x))  # type: ignore[operator]
        return found[:depths]


def _served(part: Any) -> HydraBlock:
    """A layer as it is served."""
    linear = part["linear"]
    if "res_connection" not in part:
        return HydraBlock(linear.weight, linear.bias, None, None)
    kept = part["res_connection"]
    return HydraBlock(linear.weight, linear.bias, kept.weight, kept.bias)


def training(plus: bool) -> Training:
    """Of three heads."""
    config: dict[str, Any] = {
        "model_type": "hydra",
        "hydra_num_heads": HEADS,
        "hydra_num_layers": 2,
        "hydra_head_arch": "prefix-mlp" if plus else "mlp",
        "grounded_heads": True,
    }
    if plus:
        config["prefix_config"] = PREFIX.to_dict()
    name = "hydra-plus" if plus else "hydra"
    return Training(name, HydraHeads(plus), STAGES, HEADS, HEADS, config)


if __name__ == "__main__":
    command("hydra", __doc__, training, plus="with a layer over all hidden states (Hydra++)")
