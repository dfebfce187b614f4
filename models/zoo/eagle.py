"""Train an EAGLE head for the embedded target: `python -m models.zoo.eagle all`.

EAGLE (arXiv 2401.15077): a layer over pairs of a feature and the next token guesses the next
feature; the target's own output matrix makes the token's row of it. It is trained on its own
guesses too, three steps deep, as EAGLE-3's training-time test does (arXiv 2503.01840): otherwise
it would never have seen them.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from models import llama
from models.loop import Stage, train
from models.train import divergence, missed, scaled
from models.zoo import heads

SHAPE = llama.config(layers=1, width=llama.TARGET.hidden_size, inner=960, heads=5)
STEPS, DEPTHS = 3, 4
# A later step counts less.
DEEPER = 0.8
STAGES = [
    Stage("divergence", steps=900, rows=8, length=256, start=0.5, end=0.5),
    Stage("overlap", steps=600, rows=8, length=256, start=0.5, end=0.0),
]


class EagleLayer(nn.Module):
    """The weights, under the names of the authors' files."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        width = SHAPE.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        layer = LlamaDecoderLayer(SHAPE, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Guesses of the features 1, 2, ... positions behind each root [rows, roots, width].

        Behind root i stand true pairs up to (feature i, token i + 1), then guessed ones.

        Args:
            tokens: embeddings [rows, time + 1, width].
            features: [rows, time, width].
            steps: of guesses; the last so many positions are no roots.
        """
        layer: Any = self.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        rows, time, width = features.shape
        heads_, roots = SHAPE.num_attention_heads, time - steps + 1
        size = width // heads_
        cos, sin = (part.to(features.dtype) for part in llama.angles(time, size))
        past = torch.ones(roots, roots, dtype=torch.bool).tril()
        states, found = features[:, :roots], []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            token = tokens[:, step + 1 : step + 1 + roots]
            x = F.linear(torch.cat((token, states), -1), self.fc.weight)

            def apart(part: nn.Linear, x: Tensor = x) -> Tensor:
                return F.linear(x, part.weight).view(rows, roots, heads_, size)

            at = slice(step, step + roots)
            q, k = (
                llama.rotate(apart(p), cos[at], sin[at]).transpose(1, 2)
                for p in (attention.q_proj, attention.k_proj)
            )
            keys.append(k)
            values.append(apart(attention.v_proj).transpose(1, 2))
            q = q * size**-0.5
            score = (q @ keys[0].transpose(-1, -2)).masked_fill(~past, -torch.inf)
            own = [(q * guessed).sum(-1, keepdim=True) for guessed in keys[1:]]
            share = torch.cat([score, *own], -1).softmax(-1)
            mixed = share[..., :roots] @ values[0]
            for i, value in enumerate(values[1:]):
                mixed = mixed + share[..., roots + i, None] * value
            x = x + F.linear(
                mixed.transpose(1, 2).reshape(rows, roots, width), attention.o_proj.weight
            )
            between = llama.norm(x, layer.post_attention_layernorm.weight)
            gated = F.silu(F.linear(between, mlp.gate_proj.weight))
            x = x + F.linear(gated * F.linear(between, mlp.up_proj.weight), mlp.down_proj.weight)
            found.append(x)
            states = x
        return found


def fit(folder: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run."""
    teacher, model = heads.Teacher(folder), EagleLayer()
    table = teacher.weights["embed_tokens.weight"]
    compare = {"divergence": divergence, "overlap": missed}

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        features, wanted = teacher(tokens[:, :-1])
        features, wanted = features.float(), wanted.float()
        found = model(F.embedding(tokens, table), features, STEPS)
        losses = []
        for step, guess in enumerate(found, 1):
            roots = guess.shape[1] - 1  # the next feature of the last one is not known
            there = slice(step, step + roots)
            loss = compare[stage.name](wanted[:, there], F.linear(guess[:, :roots], table))
            loss = loss + F.smooth_l1_loss(guess[:, :roots], features[:, there])
            losses.append(DEEPER ** (step - 1) * loss)
        return torch.stack(losses).sum()

    seconds = train(
        model,
        scaled(STAGES, scale),
        heads.texts(folder, cache, scale),
        torch.compile(objective, dynamic=False),
        cache / "eagle.pt",
    )
    config = SHAPE.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "tandem": heads.made_for(folder),
    }
    heads.save(output / "eagle", config, model.state_dict())
    print(f"EAGLE's head trained in {seconds / 60:.1f} min", flush=True)


@torch.inference_mode()
def report(folder: Path, output: Path) -> None:
    """Measure on the target's own texts; write acceptances into the head's configuration."""
    model, teacher = EagleLayer(), heads.Teacher(folder)
    model.load_state_dict(load_file(output / "eagle" / "model.safetensors"))
    table = teacher.weights["embed_tokens.weight"]
    first = 32
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(DEPTHS)]
    for chunk in torch.split(heads.own_texts(folder), 4):
        features, wanted = (part.float() for part in teacher(chunk[:, :-1]))
        p = wanted.softmax(-1)
        found = model(F.embedding(chunk, table), features, DEPTHS)
        for depth, guess in enumerate(found, 1):
            roots = guess.shape[1] - 1
            q = F.linear(guess[:, first:roots], table).softmax(-1)
            parts[depth - 1].append((p[:, first + depth : roots + depth], q))
    heads.report(output / "eagle", parts)


def main() -> None:
    """Train, continuing an interrupted run, or measure the result."""
    heads.command("eagle", __doc__, fit, report)


if __name__ == "__main__":
    main()
