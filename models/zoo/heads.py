"""What all heads of the embedded target are trained and measured with."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.shapes import kept_by_rank
from models import corpus, evaluate, llama, sampling
from models.loop import Stage, aligned, windows
from models.train import ALLOCATOR
from models.zoo.boost import frozen, stream, tokenizer_of
from tandem.inference.fingerprint import fingerprints, tokenizer_fingerprint

SAMPLE_BATCHES = 3
# Siblings that are worth a place of a tree.
RANKS = 4
_LEAST = 1e-3


class Teacher:
    """The frozen target."""

    def __init__(self, folder: Path) -> None:
        self.weights = frozen(folder, "target")

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the target's head reads [rows, time, width], and its logits, for tokens."""
        half = llama.Half(self.weights, llama.TARGET)
        features = llama.features(half, tokens, llama.TARGET)
        return features, torch.nn.functional.linear(features, half.table)


def texts(folder: Path, cache: Path, scale: float) -> Callable[[Stage, int], Tensor]:
    """Draws batches [rows, length + 1]: half corpus, half sampled by the target."""
    text = stream(folder, cache)
    batches = max(1, round(SAMPLE_BATCHES * scale))
    target = frozen(folder, "target")
    samples = sampling.ensure(cache / "samples", batches, text, target, llama.TARGET)

    def draw(stage: Stage, step: int) -> Tensor:
        half = replace(stage, rows=stage.rows // 2)
        begin = 0 if step % 2 else samples.shape[1] - 1 - stage.length
        sampled = aligned(samples, half, step)[:, begin : begin + stage.length + 1]
        return torch.cat([windows(text, half, step), sampled])

    return draw


def made_for(folder: Path) -> dict[str, Any]:
    """What a head's configuration says of the target beside the published keys."""
    target = LlamaForCausalLM.from_pretrained(str(folder / "target"), dtype=torch.float32)
    tokenizer = tokenizer_fingerprint(tokenizer_of(folder))
    return {
        "made_for": fingerprints(target, tokenizer).weights,
        "target_layers": target.config.num_hidden_layers,
        "tokenizer": tokenizer,
    }


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head's folder in one move, weights in bfloat16."""
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    half = {name: part.detach().to(torch.bfloat16).contiguous() for name, part in tensors.items()}
    save_file(half, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "model.safetensors").chmod(0o644)
    stale = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(stale, ignore_errors=True)
    if folder.exists():
        folder.rename(stale)
    os.replace(fresh, folder)
    shutil.rmtree(stale, ignore_errors=True)


def own_texts(folder: Path, count: int = 96) -> Tensor:
    """Texts of the target at temperature 1 behind held-out prompts [count, 288]."""
    pair = evaluate.Pair.load(folder)
    texts = [text for name, text in corpus.sources() if corpus.held_out(name)]
    tokens = torch.from_numpy(corpus.encode(pair.tokenizer, texts).astype("int64"))
    starts = torch.linspace(0, len(tokens) - evaluate.PROMPT, count).long()
    prompts = torch.stack([tokens[i : i + evaluate.PROMPT] for i in starts.tolist()])
    torch.manual_seed(0)
    with torch.inference_mode():
        return evaluate.draw_samples(pair, prompts, evaluate.SAMPLE_LENGTH)


def measured(rows: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How well rows fit, by depth: overlap, and acceptance by sibling rank.

    Args:
        rows: for each depth p and q [texts, positions, vocabulary], at the drafted place.
    """
    generator = torch.Generator().manual_seed(0)
    overlaps, acceptance = [], []
    for p, q in rows:
        overlap = torch.minimum(p, q).sum(-1)
        overlaps.append(evaluate.mean_and_error(overlap.double().numpy()))
        every = slice(None, None, 7)  # siblings are drawn at some positions: they take long
        some_p, some_q = (part[:, every].flatten(0, 1) for part in (p, q))
        siblings = torch.multinomial(some_q, RANKS, generator=generator)
        kept = [
            kept_by_rank(*part)
            for part in zip(*(torch.split(x, 128) for x in (some_p, some_q, siblings)), strict=True)
        ]
        ranks: list[float] = []
        for share in torch.cat(kept).mean(0).tolist():
            if share < _LEAST:
                break
            ranks.append(round(min([share, *ranks[-1:]]), 3))
        acceptance.append(ranks)
    return {"overlap": overlaps, "acceptance": acceptance}


def report(folder: Path, parts: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
    """Write how well rows fit beside the head's folder, and acceptances into its configuration.

    Args:
        folder: of the head.
        parts: for each depth p and q, see `measured`, text by text.
    """
    rows = [(torch.cat([p for p, _ in own]), torch.cat([q for _, q in own])) for own in parts]
    figures = measured(rows)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["tandem"]["acceptance"] = figures["acceptance"]
    path.write_text(json.dumps(config, indent=2) + "\n")
    folder.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2), flush=True)


def command(
    name: str,
    doc: str | None,
    fit: Callable[..., None],
    report: Callable[..., None],
    **flags: str,
) -> None:
    """A head's script.

    Args:
        name: of its module.
        doc: of its module.
        fit: trains: target's folder, cache, output, scale, and the flags.
        report: measures: target's folder, output, and the flags.
        flags: further options by their names, each with its help.
    """
    parser = argparse.ArgumentParser(prog=f"python -m models.zoo.{name}", description=doc)
    parser.add_argument("part", choices=["train", "evaluate", "all"])
    parser.add_argument("--pair", type=Path, default=Path("models"), help="folder of the target")
    parser.add_argument("--cache", type=Path, default=Path(".cache/heads"))
    parser.add_argument("--output", type=Path, default=Path("models"))
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every step count")
    parser.add_argument("--threads", type=int, default=1)
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    options = parser.parse_args()
    chosen = {flag: getattr(options, flag) for flag in flags}
    if not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})
    torch.set_num_threads(options.threads)
    if options.part != "evaluate":
        fit(options.pair, options.cache, options.output, options.scale, **chosen)
    if options.part != "train":
        report(options.pair, options.output, **chosen)
