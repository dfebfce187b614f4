"""Train the embedded pair: `python -m models.train all` (see README.md beside this file)."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models import corpus, evaluate, llama, sampling
from models.loop import Stage, aligned, train, windows
from tandem.distillation.allocator import keep_freed_memory
from tandem.distillation.divergences import forward_kl, tvd

TARGET_STAGES = [
    Stage("256 tokens", steps=840, rows=32, length=256, start=1.0, end=1.0),
    Stage("512 tokens", steps=380, rows=16, length=512, start=1.0, end=0.15),
    Stage("1024 tokens", steps=40, rows=8, length=1024, start=0.15, end=0.0),
]
DRAFTER_STAGES = [
    Stage("cross-entropy", steps=1500, rows=16, length=256, start=1.0, end=1.0),
    Stage("divergence", steps=1700, rows=16, length=256, start=1.0, end=0.6),
    Stage("overlap", steps=1100, rows=8, length=512, start=0.6, end=0.0),
]
SAMPLE_BATCHES = 8


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean KL(teacher || student) of logits [..., vocabulary]."""
    return forward_kl(teacher.float().log_softmax(-1), student.float().log_softmax(-1)).mean()


def missed(teacher: Tensor, student: Tensor) -> Tensor:
    """One minus the mean overlap of logits [..., vocabulary]: the total variation distance."""
    return tvd(teacher.float().log_softmax(-1), student.float().log_softmax(-1)).mean()


def cross_entropy(tokens: Tensor, logits: Tensor) -> Tensor:
    """Mean loss in nats of logits [batch, time, vocabulary] for tokens [batch, time]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def scaled(stages: list[Stage], scale: float) -> list[Stage]:
    """The stages with their step counts multiplied, for trials."""
    return [replace(stage, steps=max(1, round(stage.steps * scale))) for stage in stages]


def train_target(cache: Path, output: Path, scale: float) -> None:
    """Plain language modelling on the corpus."""
    model = llama.create(llama.TARGET, seed=0)
    w = llama.weights(model)
    stream = corpus.load(cache, "train")

    @torch.compile(dynamic=False)
    def objective(tokens: Tensor) -> Tensor:
        return cross_entropy(tokens[:, 1:], llama.logits(w, tokens[:, :-1], llama.TARGET))

    seconds = train(
        model,
        scaled(TARGET_STAGES, scale),
        lambda stage, step: windows(stream, stage, step),
        lambda stage, tokens: objective(tokens),
        cache / "target.pt",
    )
    llama.save(model, corpus.load_tokenizer(cache), output / "target")
    print(f"target trained in {seconds / 60:.1f} min", flush=True)


def distilled(
    teacher: llama.Weights,
    w: llama.Weights,
    compare: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor], Tensor]:
    """The compiled objective that compares the target's and the drafter's logits."""

    @torch.compile(dynamic=False)
    def objective(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = llama.logits(teacher, tokens, llama.TARGET)
        return compare(wanted, llama.logits(w, tokens, llama.DRAFTER))

    return objective


def train_drafter(cache: Path, output: Path, scale: float) -> None:
    """Cross-entropy, then the target's whole distribution, then the overlap itself."""
    target = LlamaForCausalLM.from_pretrained(str(output / "target"), dtype=torch.float32)
    teacher = llama.weights(target.requires_grad_(False))
    stages = scaled(DRAFTER_STAGES, scale)
    stream = corpus.load(cache, "train")
    batches = max(1, round(SAMPLE_BATCHES * scale))
    samples = sampling.ensure(cache / "samples", batches, stream, teacher, llama.TARGET)
    model = llama.create(llama.DRAFTER, seed=1)
    w = llama.weights(model)

    @torch.compile(dynamic=False)
    def plain(tokens: Tensor) -> Tensor:
        return cross_entropy(tokens[:, 1:], llama.logits(w, tokens[:, :-1], llama.DRAFTER))

    objectives = {
        "cross-entropy": plain,
        "divergence": distilled(teacher, w, divergence),
        "overlap": distilled(teacher, w, missed),
    }

    def draw(stage: Stage, step: int) -> Tensor:
        if stage.name != "overlap":
            return windows(stream, stage, step)
        half = replace(stage, rows=stage.rows // 2)
        return torch.cat([windows(stream, half, step), aligned(samples, half, step)])

    seconds = train(
        model,
        stages,
        draw,
        lambda stage, tokens: objectives[stage.name](tokens),
        cache / "drafter.pt",
    )
    llama.save(model, corpus.load_tokenizer(cache), output / "drafter")
    print(f"drafter trained in {seconds / 60:.1f} min", flush=True)


def main() -> None:
    """Run one part of the training, or all of it; an interrupted part continues."""
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    parser.add_argument("part", choices=["tokenizer", "target", "drafter", "evaluate", "all"])
    parser.add_argument("--cache", type=Path, default=Path(".cache/train"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every step count")
    options = parser.parse_args()
    keep_freed_memory()
    cache, output = options.cache, options.output
    everything = options.part == "all"
    if options.part == "tokenizer" or (everything and not (cache / "corpus.json").exists()):
        corpus.build(cache)
    if everything or options.part == "target":
        train_target(cache, output, options.scale)
    if everything or options.part == "drafter":
        train_drafter(cache, output, options.scale)
    if everything or options.part == "evaluate":
        evaluate.run(output)


if __name__ == "__main__":
    main()
