"""A low-rank adapter of the embedded target: trained here, and saved in the files of `peft`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from models import corpus, evaluate, llama
from models.zoo.training import texts
from models.zoo.training.heads import made_for, save
from tandem.inference.loading.adapter import CONFIG, WEIGHTS, merge_adapter

RANK = 32
RATE = 2e-3
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LowRank(nn.Module):
    """Changes B A of each matrix of the layers; zero at first.

    Args:
        weights: of the model that is adapted, by short name.
    """

    def __init__(self, weights: llama.Weights) -> None:
        super().__init__()
        torch.manual_seed(3)
        self._base = {name: weight for name, weight in weights.items()}
        self.names = [
            name for name in weights if name.split(".")[-2] in _MODULES and "layers" in name
        ]
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for name in self.names:
            out, into = weights[name].shape
            self.down.append(nn.Parameter(torch.randn(RANK, into) / math.sqrt(into)))
            self.up.append(nn.Parameter(torch.zeros(out, RANK)))

    def weights(self) -> dict[str, Tensor]:
        """Of the adapted model, by short name."""
        changed = {
            name: self._base[name] + up @ down
            for name, down, up in zip(self.names, self.down, self.up, strict=True)
        }
        return {**self._base, **changed}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One for all factors."""
        return [torch.optim.AdamW(self.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)]

    def publish(self, folder: Path, pair: Path, own: Mapping[str, Any]) -> None:
        """Write the adapter's folder.

        Args:
            folder: to replace.
            pair: with the target that it adapts.
            own: further keys beside what says which target that is.
        """
        from peft import LoraConfig  # takes a second

        config = LoraConfig(
            r=RANK, lora_alpha=RANK, target_modules=list(_MODULES), task_type="CAUSAL_LM"
        )
        plain: Any = config.to_dict()  # type: ignore[no-untyped-call]
        keys = json.loads(json.dumps(plain, default=sorted))
        keys["tandem"] = {**made_for(pair), **own}
        tensors = {}
        for name, down, up in zip(self.names, self.down, self.up, strict=True):
            place = f"base_model.model.model.{name.removesuffix('.weight')}"
            tensors[f"{place}.lora_A.weight"] = down
            tensors[f"{place}.lora_B.weight"] = up
        save(folder, keys, tensors, CONFIG, WEIGHTS)


def held_out_loss(pair: Path, weights: llama.Weights) -> float:
    """Nats a token of held-out text, in windows of `evaluate.WINDOW`."""
    half = llama.Half(weights, llama.TARGET)
    held_out = [text for name, text in corpus.sources() if corpus.held_out(name)]
    stream = corpus.encode(texts.tokenizer_of(pair), held_out)
    size = evaluate.WINDOW
    count = (len(stream) - 1) // size
    total, places = 0.0, 0
    for first in range(0, count, 8):
        starts = [i * size for i in range(first, min(count, first + 8))]
        rows = [stream[start : start + size + 1].astype("int64") for start in starts]
        tokens = torch.stack([torch.from_numpy(row) for row in rows])
        states = llama.features(half, tokens[:, :-1], llama.TARGET)
        logits, wanted = F.linear(states, half.table).float(), tokens[:, 1:].flatten()
        total += float(F.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum"))
        places += len(wanted)
    return round(total / places, 4)


def adapted(pair: Path, folder: Path) -> llama.Weights:
    """The target's weights with an adapter's changes, in float32, by short name."""
    target = LlamaForCausalLM.from_pretrained(str(pair / "target"), dtype=torch.float32)
    merged: Any = merge_adapter(target, str(folder))
    return llama.weights(merged)
