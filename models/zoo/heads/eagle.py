"""Train an EAGLE head for the embedded target: `python -m models.zoo.heads.eagle all [--fused]`.

EAGLE (arXiv 2401.15077): a layer over pairs of a feature and the next token guesses the next
feature; the target's own output matrix makes the token's row of it. It is trained on its own
guesses too, three steps deep, as EAGLE-3's training-time test does (arXiv 2503.01840): otherwise
it would never have seen them. With `--fused` it is EAGLE-3's: it reads three layers of the target,
and its guesses are of no feature, only of the token's row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from models import llama
from models.loop import Stage
from models.zoo.training.heads import Training, command

SHAPE = llama.config(layers=1, width=llama.TARGET.hidden_size, inner=960, heads=5)
STEPS, DEPTHS = 3, 4
# The target is too shallow for the authors' choice: 2, half of the layers, all but 3.
FUSED = (1, 3, 5)
STAGES = [
    Stage("divergence", steps=900, rows=8, length=256, start=0.5, end=0.5),
    Stage("overlap", steps=600, rows=8, length=256, start=0.5, end=0.0),
]


class EagleLayer(nn.Module):
    """The weights, under the names of the authors' files.

    Args:
        fused: see above.
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        width = SHAPE.hidden_size
        self.fused = fused
        self.fc = nn.Linear((len(FUSED) if fused else 2) * width, width, bias=False)
        layer: Any = LlamaDecoderLayer(SHAPE, 0)
        if fused:
            own = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(own, name, nn.Linear(2 * width, width, bias=False))
            layer.hidden_norm = LlamaRMSNorm(width)
            self.midlayer, self.norm = layer, LlamaRMSNorm(width)
        else:
            layer.input_layernorm = nn.Identity()
            self.layers = nn.ModuleList([layer])
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """See `Training`: guesses of the features 1, 2, ... positions after each root.

        At root i stand true pairs up to (feature i, token i + 1), then guessed ones. The last
        positions are no roots.
        """
        layer: Any = self.midlayer if self.fused else self.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        rows, time, width = (*features.shape[:2], SHAPE.hidden_size)
        heads_, roots = SHAPE.num_attention_heads, time - depths + 1
        size = width // heads_
        cos, sin = (part.to(features.dtype) for part in llama.angles(time, size))
        past = torch.ones(roots, roots, dtype=torch.bool).tril()
        states, found = features[:, :roots], []
        if self.fused:
            states = self.fc(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(depths):
            token = tokens[:, step + 1 : step + 1 + roots]
            if self.fused:
                x, normed = states, llama.norm(states, layer.hidden_norm.weight)
                read = torch.cat((llama.norm(token, layer.input_layernorm.weight), normed), -1)
            else:
                x = read = self.fc(torch.cat((token, states), -1))

            def apart(part: nn.Linear, read: Tensor = read) -> Tensor:
                return F.linear(read, part.weight).view(rows, roots, heads_, size)

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
            found.append(llama.norm(x, self.norm.weight) if self.fused else x)
            states = x
        return found


def training(fused: bool) -> Training:
    """Of one layer."""
    config = SHAPE.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    if not fused:
        return Training("eagle", EagleLayer(), STAGES, STEPS, DEPTHS, config, guesses=True)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": FUSED,
        "draft_vocab_size": SHAPE.vocab_size,
    }
    return Training("eagle-fused", EagleLayer(fused), STAGES, STEPS, DEPTHS, config, reads=FUSED)


if __name__ == "__main__":
    command("eagle", __doc__, training, fused="of three layers of the target (EAGLE-3)")
