"""What all heads of the embedded target are trained and measured with."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from models.zoo.training.script import options_of
from tandem.distillation.divergences import discounted
from tandem.inference.fingerprint import fingerprints, tokenizer_fingerprint

# Siblings that are worth a place of a tree.
RANKS = 4
_LEAST = 1e-3
_COMPARE = {"divergence": divergence, "overlap": missed}


@dataclass(frozen=True)
class Training:
    """How a head is trained, and how it is published.

    Attributes:
        name: of its folder.
        model: its weights, under the names of the files. It makes of embeddings of tokens
            [rows, time + 1, width], features [rows, time, read] and a number of depths what the
            output matrix reads, for each depth [rows, roots, width]: root i is after feature i.
        stages: of a run.
        reads: hidden states of the target, by their places in `llama.hidden_states`; those of a
            position are one row.
        depths: that are trained.
        measured: depths that are measured.
        config: the keys that its authors publish.
        guesses: what the output matrix reads is a guess of the feature there, and learns to be it.
    """

    name: str
    model: nn.Module
    stages: Sequence[Stage]
    depths: int
    measured: int
    config: Mapping[str, Any]
    guesses: bool = False
    reads: Sequence[int] = (-1,)


class Teacher:
    """The frozen target.

    Args:
        folder: of the pair.
        reads: see `Training`.
    """

    def __init__(self, folder: Path, reads: Sequence[int]) -> None:
        self.weights = texts.frozen(folder, "target")
        self._reads = reads

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [rows, time, read], and the target's logits, for tokens."""
        half = llama.Half(self.weights, llama.TARGET)
        states = llama.hidden_states(half, tokens, llama.TARGET)
        read = torch.cat([states[place] for place in self._reads], -1)
        return read, F.linear(states[-1], half.table)


def fit(training: Training, folder: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run, and write the head's folder."""
    teacher, model = Teacher(folder, training.reads), training.model
    table = teacher.weights["embed_tokens.weight"]

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        features, wanted = (part.float() for part in teacher(tokens[:, :-1]))
        found = model(F.embedding(tokens, table), features, training.depths)
        losses = []
        for depth, states in enumerate(found, 1):
            states, there = _known(states, features, depth)
            loss = _COMPARE[stage.name](wanted[:, there], F.linear(states, table))
            if training.guesses:
                loss = loss + F.smooth_l1_loss(states, features[:, there])
            losses.append(loss)
        return discounted(losses)

    seconds = train(
        model,
        scaled(list(training.stages), scale),
        texts.mixed(folder, cache, scale),
        torch.compile(objective, dynamic=False),
        cache / f"{training.name}.pt",
    )
    config = {**training.config, "tandem": made_for(folder)}
    save(output / training.name, config, model.state_dict())
    print(f"{training.name} trained in {seconds / 60:.1f} min", flush=True)


def _known(states: Tensor, features: Tensor, depth: int) -> tuple[Tensor, slice]:
    """The states at whose places the target's rows are known, and where these rows are."""
    roots = min(states.shape[1], features.shape[1] - depth)
    return states[:, :roots], slice(depth, depth + roots)


@torch.inference_mode()
def report(training: Training, folder: Path, output: Path) -> None:
    """Measure on the target's own texts. Write the figures beside the head's folder, and
    acceptances into its configuration."""
    teacher, model = Teacher(folder, training.reads), training.model
    head = output / training.name
    model.load_state_dict(load_file(head / "model.safetensors"))
    table = teacher.weights["embed_tokens.weight"]
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(training.measured)]
    for chunk in torch.split(own_texts(folder), 4):
        features, wanted = (part.float() for part in teacher(chunk[:, :-1]))
        p = wanted.softmax(-1)
        found = model(F.embedding(chunk, table), features, training.measured)
        for depth, states in enumerate(found, 1):
            states, there = _known(states, features, depth)
            q = F.linear(states[:, evaluate.PROMPT :], table).softmax(-1)
            parts[depth - 1].append((p[:, there][:, evaluate.PROMPT :], q))
    rows = [(torch.cat([p for p, _ in own]), torch.cat([q for _, q in own])) for own in parts]
    figures = measured(rows)
    path = head / "config.json"
    config = json.loads(path.read_text())
    config["tandem"]["acceptance"] = figures["acceptance"]
    path.write_text(json.dumps(config, indent=2) + "\n")
    head.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2), flush=True)


def made_for(folder: Path) -> dict[str, Any]:
    """What a head's configuration says of the target beside the published keys."""
    target = LlamaForCausalLM.from_pretrained(str(folder / "target"), dtype=torch.float32)
    tokenizer = tokenizer_fingerprint(texts.tokenizer_of(folder))
    return {
        "made_for": fingerprints(target, tokenizer).weights,
        "target_layers": target.config.num_hidden_layers,
        "tokenizer": tokenizer,
    }


def save(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    config_name: str = "config.json",
    weights_name: str = "model.safetensors",
) -> None:
    """Replace the folder of a head or an adapter, weights in bfloat16."""
    half = {name: part.detach().to(torch.bfloat16).contiguous() for name, part in tensors.items()}
    with llama.replacing(folder) as fresh:
        (fresh / config_name).write_text(json.dumps(config, indent=2) + "\n")
        save_file(half, fresh / weights_name, metadata={"format": "pt"})


def own_texts(folder: Path, count: int = 96) -> Tensor:
    """Texts of the target at temperature 1 after held-out prompts [count, 288]."""
    pair = evaluate.Pair.load(folder)
    held_out = [text for name, text in corpus.sources() if corpus.held_out(name)]
    tokens = torch.from_numpy(corpus.encode(pair.tokenizer, held_out).astype("int64"))
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
            evaluate.kept_by_rank(*part)
            for part in zip(*(torch.split(x, 128) for x in (some_p, some_q, siblings)), strict=True)
        ]
        ranks: list[float] = []
        for share in torch.cat(kept).mean(0).tolist():
            if share < _LEAST:
                break
            ranks.append(round(min([share, *ranks[-1:]]), 3))
        acceptance.append(ranks)
    return {"overlap": overlaps, "acceptance": acceptance}


def command(name: str, doc: str | None, make: Callable[..., Training], **flags: str) -> None:
    """A head's script.

    Args:
        name: of its module.
        doc: of its module.
        make: what is trained; takes the flags.
        flags: options by their names, each with its help.
    """
    options = options_of(f"heads.{name}", doc, ".cache/heads", flags)
    training = make(**{flag: getattr(options, flag) for flag in flags})
    if options.part != "evaluate":
        fit(training, options.pair, options.cache, options.output, options.scale)
    if options.part != "train":
        report(training, options.pair, options.output)
