"""Measure the committed pair with transformers' own float32 forward pass."""

import json
import math
import platform
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models import corpus
from models.llama import END_ID
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS

WINDOW = 512
ROWS = 8
GAMMA = 4
SAMPLE_ROWS = 96
SAMPLE_LENGTH = 256
PROMPT = 32
EVERY = 20

Row = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """Both models in float32, and their tokenizer."""

    target: LlamaForCausalLM
    drafter: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, folder: Path) -> "Pair":
        """Read `target` and `drafter` from `folder`."""
        target, drafter = (
            LlamaForCausalLM.from_pretrained(str(folder / name), dtype=torch.float32).eval()
            for name in ("target", "drafter")
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder / "target"))
        return cls(target, drafter, tokenizer)

    def distributions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """p and q [rows, time, vocabulary] after every position of tokens [rows, time]."""
        p = self.target(input_ids=tokens, use_cache=False).logits.softmax(-1)
        q = self.drafter(input_ids=tokens, use_cache=False).logits.softmax(-1)
        return p, q


def mean_and_error(rows: Row) -> dict[str, float]:
    """Mean over rows [rows, positions] and its standard error, rows being independent."""
    each = rows.mean(-1)
    return {
        "mean": round(float(each.mean()), 4),
        "standard_error": round(float(each.std(ddof=1) / math.sqrt(len(each))), 4),
    }


def comparison(pair: Pair, tokens: Tensor, skip: int) -> dict[str, Row]:
    """Overlap, agreement of the likeliest tokens and both losses [rows, positions] after `skip`."""
    found: dict[str, list[Row]] = {}
    for chunk in torch.split(tokens, ROWS):
        p, q = (part[:, skip:] for part in pair.distributions(chunk[:, :-1]))
        following = chunk[:, 1 + skip :, None]
        measured = {
            "overlap": torch.minimum(p, q).sum(-1),
            "greedy_agreement": (p.argmax(-1) == q.argmax(-1)).float(),
            "target_loss": -p.gather(-1, following)[..., 0].log(),
            "drafter_loss": -q.gather(-1, following)[..., 0].log(),
        }
        for name, value in measured.items():
            found.setdefault(name, []).append(value.double().numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def draw_samples(pair: Pair, prompts: Tensor, length: int) -> Tensor:
    """Target samples at temperature 1: prompts [rows, given] extended by `length` tokens."""
    rows, fed, cache = prompts, prompts, None
    for _ in range(length):
        output = pair.target(input_ids=fed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        fed = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
        rows = torch.cat([rows, fed], dim=-1)
    return rows


def drafted(pair: Pair, samples: Tensor, given: int) -> Row:
    """Expected number of accepted tokens [rows, cuts] when drafting at every 20th position.

    Drafts are sampled token by token at temperature 1. Given the draft, its first k tokens are
    accepted with probability Π min(1, p / q); the sum of this over k is averaged.
    """
    columns = []
    for cut in range(given, samples.shape[1], EVERY):
        context = samples[:, :cut]
        chances = []
        for _ in range(GAMMA):
            q = pair.drafter(input_ids=context, use_cache=False).logits[:, -1].softmax(-1)
            token = torch.multinomial(q, 1)
            chances.append(q.gather(-1, token))
            context = torch.cat([context, token], dim=-1)
        p = pair.target(input_ids=context[:, :-1], use_cache=False).logits[:, -GAMMA:].softmax(-1)
        wanted = p.gather(-1, context[:, -GAMMA:, None])[..., 0]
        accepted = (wanted / torch.cat(chances, dim=-1)).clamp(max=1).cumprod(-1).sum(-1)
        columns.append(accepted.double().numpy())
    return np.stack(columns, axis=-1)


def on_text(pair: Pair, stream: corpus.Tokens, size: int) -> dict[str, Any]:
    """Losses, overlap and agreement on held-out files of `size` bytes, in windows of 512 tokens."""
    count = (len(stream) - 1) // WINDOW
    starts = [slice(i * WINDOW, (i + 1) * WINDOW + 1) for i in range(count)]
    tokens = torch.from_numpy(np.stack([stream[start] for start in starts]).astype(np.int64))
    rows = comparison(pair, tokens, skip=0)
    found: dict[str, Any] = {"positions": count * WINDOW}
    for name in ("target", "drafter"):
        nats = float(rows[f"{name}_loss"].mean())
        found[f"{name}_nats_per_token"] = round(nats, 4)
        found[f"{name}_bits_per_byte"] = round(nats * len(stream) / size / math.log(2), 4)
    for name in ("overlap", "greedy_agreement"):
        found[name] = mean_and_error(rows[name])
    return found


def on_samples(pair: Pair, prompts: Tensor) -> dict[str, Any]:
    """Overlap, agreement and acceptance on target samples that continue prompts [rows, given]."""
    given = prompts.shape[1]
    samples = draw_samples(pair, prompts, SAMPLE_LENGTH)
    rows = comparison(pair, samples, skip=given - 1)
    accepted = drafted(pair, samples, given)
    return {
        "positions": int(rows["overlap"].size),
        "target_nats_per_token": round(float(rows["target_loss"].mean()), 4),
        "overlap": mean_and_error(rows["overlap"]),
        "greedy_agreement": mean_and_error(rows["greedy_agreement"]),
        "acceptance_rate": {"gamma": GAMMA, "rounds": accepted.size}
        | mean_and_error(accepted / GAMMA),
        "text": pair.tokenizer.decode(samples[0, given:]),
    }


def context_losses(pair: Pair, stream: corpus.Tokens) -> dict[str, float]:
    """The target's nats a token by position in a window of 2,048 held-out tokens."""
    edges = [0, 256, 512, 1024, 1536, 2048]
    length = edges[-1]
    count = min(24, (len(stream) - 1) // length)
    starts = [i * length for i in range(count)]
    tokens = torch.from_numpy(
        np.stack([stream[i : i + length + 1] for i in starts]).astype(np.int64)
    )
    loss = np.concatenate(
        [comparison(pair, chunk, skip=0)["target_loss"] for chunk in torch.split(tokens, 4)]
    )
    return {f"{a}-{b}": round(float(loss[:, a:b].mean()), 3) for a, b in pairwise(edges)}


def kept_by_rank(p: Tensor, q: Tensor, siblings: Tensor) -> Tensor:
    """[N, K]: the probability that each sibling is the one that `token` keeps.

    Args:
        p: [N, V], the target's rows.
        q: [N, V], the drafter's.
        siblings: [N, K], drawn from q without replacement, in order.
    """
    count, ranks = siblings.shape
    star = Proposal.from_dense(
        siblings,
        q[:, None].double(),
        parents=[[0] * ranks] * count,
        row_of=torch.zeros_like(siblings),
        distinct=True,
    )
    places = p[:, None].double().expand(-1, ranks + 1, -1)
    h = VERIFIERS["token"].accept_probabilities(star, places)
    reached = torch.nn.functional.pad((1 - h).cumprod(1)[:, :-1], (1, 0), value=1.0)
    return h * reached


@torch.inference_mode()
def run(folder: Path) -> None:
    """Measure the pair in `folder` on this Python's held-out files; write `metrics.json` there."""
    began = time.monotonic()
    torch.manual_seed(0)
    pair = Pair.load(folder)
    texts = [text for name, text in corpus.sources() if corpus.held_out(name)]
    size = sum(len(text.encode()) for text in texts)
    stream = corpus.encode(pair.tokenizer, texts)
    begin = np.random.default_rng(0).integers(len(stream) - PROMPT, size=SAMPLE_ROWS)
    prompts = torch.from_numpy(np.stack([stream[i : i + PROMPT] for i in begin]).astype(np.int64))
    metrics = {
        "python": platform.python_version(),
        "parameters": {
            "target": pair.target.num_parameters(),
            "drafter": pair.drafter.num_parameters(),
        },
        "held_out_files": {"files": len(texts), "bytes": size, "tokens": len(stream)},
        "held_out_text": on_text(pair, stream, size),
        "samples_from_nothing": on_samples(pair, torch.full((SAMPLE_ROWS, 1), END_ID)),
        "samples_from_prompts": on_samples(pair, prompts),
        "target_nats_by_position": context_losses(pair, stream),
        "seconds": round(time.monotonic() - began, 1),
    }
    text = json.dumps(metrics, indent=2) + "\n"
    (folder / "metrics.json").write_text(text)
    print(text, flush=True)
