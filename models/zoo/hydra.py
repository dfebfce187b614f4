"""Train Hydra's heads for the embedded target: `python -m models.zoo.hydra all [--plus]`.

Hydra (arXiv 2402.05109): a head reads the target's hidden state and the embeddings of the tokens on
the path. With `--plus` a decoder layer over all hidden states comes first (Hydra++). The loss is
the target's whole row, as in the paper's teacher loss. The target's output matrix is shared.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaModel

from models import llama
from models.loop import Stage, train
from models.train import divergence, missed, scaled
from models.zoo import heads

HEADS = 3
WIDTH = llama.TARGET.hidden_size
PREFIX = llama.config(layers=1, width=WIDTH, inner=960, heads=5)
# A later token counts less.
DEEPER = 0.8
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
        layer = prefix.layers[0]
        own = layer.self_attn
        qkv = torch.cat([part.weight for part in (own.q_proj, own.k_proj, own.v_proj)])
        seen = llama.norm(features, layer.input_layernorm.weight)
        x = features + llama.attention(seen, qkv, own.o_proj.weight, PREFIX.num_attention_heads)
        between = llama.norm(x, layer.post_attention_layernorm.weight)
        gated = F.silu(layer.mlp.gate_proj(between)) * layer.mlp.up_proj(between)
        return llama.norm(x + layer.mlp.down_proj(gated), prefix.norm.weight)

    def forward(self, tokens: Tensor, features: Tensor) -> list[Tensor]:
        """For each head [rows, roots, width], behind roots that have all the tokens it reads.

        Args:
            tokens: embeddings [rows, time + 1, width].
            features: [rows, time, width].
        """
        time, found = features.shape[1], []
        read = self._prefixed(features)
        for k, block in enumerate(self.hydra_mlp):
            roots = time - k
            path = [tokens[:, 1 + i : 1 + i + roots] for i in range(k + 1)]
            x = torch.cat([read[:, :roots], *path], -1)
            first, second = block["1"], block["3"]  # type: ignore[index]
            x = first["res_connection"](x) + F.silu(first["linear"](x))
            found.append(x + F.silu(second["linear"](x)))
        return found


def fit(folder: Path, cache: Path, output: Path, scale: float, plus: bool = False) -> None:
    """Train, continuing an interrupted run."""
    teacher, model, name = heads.Teacher(folder), HydraHeads(plus), _name(plus)
    table = teacher.weights["embed_tokens.weight"]
    compare = {"divergence": divergence, "overlap": missed}

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        features, wanted = (part.float() for part in teacher(tokens[:, :-1]))
        found = model(F.embedding(tokens, table), features)
        losses = []
        for k, states in enumerate(found):
            roots = states.shape[1] - 1  # the row behind the last token is not known
            rows = F.linear(states[:, :roots], table)
            losses.append(DEEPER**k * compare[stage.name](wanted[:, 1 + k :][:, :roots], rows))
        return torch.stack(losses).sum()

    seconds = train(
        model,
        scaled(STAGES, scale),
        heads.texts(folder, cache, scale),
        torch.compile(objective, dynamic=False),
        cache / f"{name}.pt",
    )
    config = {
        "model_type": "hydra",
        "hydra_num_heads": HEADS,
        "hydra_num_layers": 2,
        "hydra_head_arch": "prefix-mlp" if plus else "mlp",
        "grounded_heads": True,
        "tandem": heads.made_for(folder),
    }
    if plus:
        config["prefix_config"] = PREFIX.to_dict()
    heads.save(output / name, config, model.state_dict())
    print(f"{name} trained in {seconds / 60:.1f} min", flush=True)


@torch.inference_mode()
def report(folder: Path, output: Path, plus: bool = False) -> None:
    """Measure on the target's own texts; write acceptances into the head's configuration."""
    model, teacher, name = HydraHeads(plus), heads.Teacher(folder), _name(plus)
    model.load_state_dict(load_file(output / name / "model.safetensors"))
    table = teacher.weights["embed_tokens.weight"]
    first = 32
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(HEADS)]
    for chunk in torch.split(heads.own_texts(folder), 4):
        features, wanted = (part.float() for part in teacher(chunk[:, :-1]))
        p = wanted.softmax(-1)
        for k, states in enumerate(model(F.embedding(chunk, table), features)):
            roots = states.shape[1] - 1
            q = F.linear(states[:, first:roots], table).softmax(-1)
            parts[k].append((p[:, 1 + k + first : 1 + k + roots], q))
    heads.report(output / name, parts)


def _name(plus: bool) -> str:
    return "hydra-plus" if plus else "hydra"


def main() -> None:
    """Train, continuing an interrupted run, or measure the result."""
    heads.command(
        "hydra", __doc__, fit, report, plus="with a layer over all hidden states (Hydra++)"
    )


if __name__ == "__main__":
    main()
