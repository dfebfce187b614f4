"""Train a target whose layers are used several times, with an early prediction after each cycle:
`python -m models.zoo.speed all`.

SPEED (Hooper et al., arXiv 2310.12072): a decoder that shares the weights of a group of layers, so
that tokens which have gone through different numbers of cycles go through the group together. The
final norm and the output matrix follow each cycle; after the last one they learn the rows of the
embedded target, after the others those after the last.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from models import corpus, evaluate, llama
from models.loop import Stage, train
from models.train import divergence, missed, scaled
from models.zoo.training import texts
from models.zoo.training.script import run, write_figures
from tandem.inference.loading.shared_layers import CYCLES as KEY

NAME = "speed"
LAYERS, CYCLES = 2, 3
SHAPE = llama.config(layers=LAYERS, width=320, inner=960, heads=5)
STAGES = [
    Stage("divergence", steps=2000, rows=8, length=256, start=1.0, end=0.7),
    Stage("overlap", steps=1400, rows=8, length=256, start=0.7, end=0.0),
]
_COMPARE = {"divergence": divergence, "overlap": missed}
# The weight of an early prediction.
_EARLY = 0.4


def states_of(half: llama.Half, tokens: Tensor) -> list[Tensor]:
    """What the head reads after each cycle [batch, time, width], for tokens [batch, time]."""
    x, found = F.embedding(tokens, half.table), []
    for _ in range(CYCLES):
        for layer in half.layers:
            seen = llama.norm(x, layer["first"])
            x = x + llama.attention(seen, layer["qkv"], layer["out"], SHAPE.num_attention_heads)
            x = llama.feed_forward(x, layer)
        found.append(llama.norm(x, half.norm))
    return found


def begun(pair: Path) -> LlamaForCausalLM:
    """A model to train, with the embedded target's table."""
    model = llama.create(SHAPE, seed=5)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(texts.frozen(pair, "target")["embed_tokens.weight"])
    return model


def fit(pair: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run, and write the model's folder."""
    model, teacher = begun(pair), texts.frozen(pair, "target")
    w = llama.weights(model)

    @torch.compile(dynamic=False)
    def losses(stage: str, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = llama.logits(teacher, tokens, llama.TARGET)
        half = llama.Half(w, SHAPE)
        *early, last = [F.linear(states, half.table) for states in states_of(half, tokens)]
        lost = divergence(wanted, last)
        for rows in early:
            lost = lost + _EARLY * _COMPARE[stage](last.detach(), rows)
        return lost

    seconds = train(
        model,
        scaled(list(STAGES), scale),
        texts.mixed(pair, cache, scale),
        lambda stage, tokens: losses(stage.name, tokens[:, :-1]),
        cache / f"{NAME}.pt",
    )
    save(model, pair, output / NAME)
    print(f"{NAME} trained in {seconds / 60:.1f} min", flush=True)


def save(model: nn.Module, pair: Path, folder: Path) -> None:
    """Replace a folder by the model: each shared layer once, in bfloat16."""
    config: Any = llama.config(layers=LAYERS * CYCLES, width=320, inner=960, heads=5)
    config.update({KEY: CYCLES, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    with llama.replacing(folder) as fresh:
        config.save_pretrained(str(fresh))
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            (fresh / name).write_bytes((pair / "target" / name).read_bytes())


@torch.inference_mode()
def report(pair: Path, output: Path) -> None:
    """Measure the loss after each cycle on held-out text, and how often the likeliest token of a
    cycle is the last one's."""
    held_out = [text for name, text in corpus.sources() if corpus.held_out(name)]
    stream = corpus.encode(texts.tokenizer_of(pair), held_out)
    w = load_file(output / NAME / "model.safetensors")
    half = llama.Half(
        {name.removeprefix("model."): tensor.float() for name, tensor in w.items()}, SHAPE
    )
    size = evaluate.WINDOW
    starts = range(0, len(stream) - size - 1, size)
    lost: list[list[float]] = [[] for _ in range(CYCLES)]
    agreed: list[list[Tensor]] = [[] for _ in range(CYCLES - 1)]
    overlaps: list[list[Tensor]] = [[] for _ in range(CYCLES - 1)]
    for start in starts:
        tokens = torch.from_numpy(stream[start : start + size + 1].astype("int64"))[None]
        rows = [F.linear(states, half.table).float() for states in states_of(half, tokens[:, :-1])]
        p = rows[-1].softmax(-1)
        for own, row in zip(lost, rows, strict=True):
            own.append(float(F.cross_entropy(row[0], tokens[0, 1:])))
        for same, over, row in zip(agreed, overlaps, rows[:-1], strict=True):
            same.append((row.argmax(-1) == p.argmax(-1)).float())
            over.append(torch.minimum(row.softmax(-1), p).sum(-1))
    figures: dict[str, Any] = {
        "parameters": sum(tensor.numel() for tensor in w.values()),
        "layers": LAYERS,
        "cycles": CYCLES,
        "held_out_nats_per_token": [round(sum(own) / len(own), 4) for own in lost],
        "agreement_with_the_last": [
            evaluate.mean_and_error(torch.cat(own).double().numpy()) for own in agreed
        ],
        "overlap_with_the_last": [
            evaluate.mean_and_error(torch.cat(own).double().numpy()) for own in overlaps
        ],
    }
    write_figures(output, NAME, figures)


if __name__ == "__main__":
    run(NAME, __doc__, fit, report)
