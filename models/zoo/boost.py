"""Tune a second drafter on what the first one misses: `python -m models.zoo.boost train`.

SpecInfer's boost-tuning (arXiv 2305.09781): in a forest the second drafter's first token is
judged against what the first drafter left of the target's row. So it is tuned on that, instead of
on a subset of samples. It starts as a copy of the first (see README.md in the folder above).
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models import corpus, evaluate, llama
from models.loop import Stage, train
from models.train import scaled
from models.zoo.training.script import options_of
from models.zoo.training.texts import frozen, mixed, tokenizer_of

STAGES = [
    Stage("search", steps=1200, rows=8, length=256, start=0.6, end=0.6),
    Stage("decay", steps=1000, rows=8, length=256, start=0.6, end=0.0),
]
# A second path of depth 4 gains c (1 + β + β² + β³) tokens: c is the share that its first token
# covers, β its overlap with the target's rows after that token, where it is the only path. These
# weights are the gains from its rows of depth 2, 3 and 4 over that from its first, for β = 0.7.
DEEPER = (0.87, 0.47, 0.19)
_TINY = 1e-9


def excess(p: Tensor, q: Tensor) -> Tensor:
    """What q misses of p, (p - q)+ [..., vocabulary]."""
    return (p - q).clamp(min=0)


def uncovered(tokens: Tensor, p: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Mean mass of the target's rows that a path of the second drafter leaves uncovered.

    Its first token should cover what the first drafter misses. After a token that it covered it is
    the only path, and should cover everything.

    Args:
        tokens: [rows, time] of the corpus, or sampled by the target.
        p: [rows, time, vocabulary] the target's rows after each token.
        first: the first drafter's rows.
        second: the rows of the drafter that is tuned.
    """
    left = excess(p, first)
    wins = torch.minimum(left, left.sum(-1, keepdim=True) * second)
    root = left.sum(-1) - wins.sum(-1)
    # The probability that each token came from the second drafter.
    following = tokens[:, 1:, None]
    came = wins[:, :-1].detach().gather(-1, following) / p[:, :-1].gather(-1, following)
    came = came[..., 0].nan_to_num().clamp(max=1)
    alone = excess(p, second).sum(-1)
    deeper = [
        weight * (came[:, : came.shape[1] - behind] * alone[:, 1 + behind :]).mean()
        for behind, weight in enumerate(DEEPER)
    ]
    return root.mean() + torch.stack(deeper).sum()


def tune(folder: Path, cache: Path, output: Path, scale: float) -> None:
    """Half of each batch is the corpus, half is sampled by the target."""
    target, first = frozen(folder, "target"), frozen(folder, "drafter")
    model = LlamaForCausalLM.from_pretrained(str(folder / "drafter"), dtype=torch.float32)
    w = llama.weights(model)

    @torch.compile(dynamic=False)
    def objective(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            p, q = (
                llama.logits(own, tokens, shape).float().softmax(-1)
                for own, shape in ((target, llama.TARGET), (first, llama.DRAFTER))
            )
        return uncovered(tokens, p, q, llama.logits(w, tokens, llama.DRAFTER).float().softmax(-1))

    seconds = train(
        model,
        scaled(STAGES, scale),
        mixed(folder, cache, scale),
        lambda stage, tokens: objective(tokens),
        cache / "boosted.pt",
    )
    llama.save(model, tokenizer_of(folder), output / "boosted")
    print(f"boosted drafter tuned in {seconds / 60:.1f} min", flush=True)


def covered(p: Tensor, first: Tensor, second: Tensor, generator: torch.Generator) -> Tensor:
    """The part of the target's mass missed by the first draw that a second draw wins [positions].

    As for siblings without replacement: the first token is drawn given that it is rejected, and
    removed from the second drafter's row.

    Args:
        p: [positions, vocabulary] the target's rows.
        first: rows of the first draw.
        second: rows of the second draw.
        generator: draws the first tokens.
    """
    left = excess(p, first)
    missed = left.sum(-1, keepdim=True)
    rejected = torch.multinomial(excess(first, p) + _TINY, 1, generator=generator)
    without = second.scatter(-1, rejected, 0.0)
    without = without / without.sum(-1, keepdim=True).clamp(min=_TINY)
    return torch.minimum(left, missed * without).sum(-1)


def rows_of(models: list[Any], tokens: Tensor) -> Iterator[list[Tensor]]:
    """Rows [n, vocabulary] of each model, for four texts of tokens [rows, time] at a time."""
    for chunk in torch.split(tokens, 4):
        yield [
            model(input_ids=chunk, use_cache=False).logits.softmax(-1).flatten(0, 1)
            for model in models
        ]


def measured(models: list[Any], tokens: Tensor, texts: int) -> dict[str, float]:
    """How much of what the drafter misses is covered by the boosted one, and by a second draw."""
    generator = torch.Generator().manual_seed(0)
    missed, boosted, again, overlap = [], [], [], []
    for p, first, second in rows_of(models, tokens):
        missed.append(excess(p, first).sum(-1))
        boosted.append(covered(p, first, second, generator))
        again.append(covered(p, first, first, generator))
        overlap.append(torch.minimum(p, second).sum(-1))
    per_text = [torch.cat(parts).view(texts, -1).mean(1).double() for parts in
                (missed, boosted, again, overlap)]  # fmt: skip
    of = per_text[0].mean()
    gain = (per_text[1] - per_text[2]) / of
    return {
        "positions": tokens.numel(),
        "missed": round(float(of), 4),
        "covered_by_boosted": round(float(per_text[1].mean() / of), 4),
        "covered_by_a_second_draw": round(float(per_text[2].mean() / of), 4),
        "gain_standard_error": round(float(gain.std() / texts**0.5), 4),
        "overlap_of_boosted_alone": round(float(per_text[3].mean()), 4),
    }


@torch.inference_mode()
def report(folder: Path, output: Path) -> None:
    """Measure on held-out text and on texts of the target; write `boost.json` beside the models."""
    began = time.monotonic()
    torch.manual_seed(0)
    pair = evaluate.Pair.load(folder)
    boosted = LlamaForCausalLM.from_pretrained(str(output / "boosted"), dtype=torch.float32)
    models = [pair.target, pair.drafter, boosted.eval()]
    texts = [text for name, text in corpus.sources() if corpus.held_out(name)]
    tokens = corpus.encode(pair.tokenizer, texts).astype(np.int64)
    count = min(96, len(tokens) // evaluate.WINDOW)
    starts = np.linspace(0, len(tokens) - evaluate.WINDOW, count).astype(int)
    held_out = torch.from_numpy(np.stack([tokens[i : i + evaluate.WINDOW] for i in starts]))
    prompts = held_out[:, : evaluate.PROMPT]
    sampled = evaluate.draw_samples(pair, prompts, evaluate.SAMPLE_LENGTH)
    found = {
        "held_out_text": measured(models, held_out, count),
        "samples_from_prompts": measured(models, sampled[:, evaluate.PROMPT :], count),
        "seconds": round(time.monotonic() - began, 1),
    }
    text = json.dumps(found, indent=2) + "\n"
    (output / "boost.json").write_text(text)
    print(text, flush=True)


def main() -> None:
    """Tune, continuing an interrupted run, or measure the result."""
    options = options_of("boost", __doc__, ".cache/boost")
    if options.part != "evaluate":
        tune(options.pair, options.cache, options.output, options.scale)
    if options.part != "train":
        report(options.pair, options.output)


if __name__ == "__main__":
    main()
