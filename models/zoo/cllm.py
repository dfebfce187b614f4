"""Train an adapter of the embedded target by which Jacobi decoding takes several tokens a pass:
`python -m models.zoo.cllm all`.

CLLM (Kou et al., arXiv 2403.00835, equations 4 to 6): from any state of its own Jacobi iteration
the target predicts the fixed point, which is its greedy text. Here the states are those that the
weights of this step reach (the paper collects them from the weights before), and the change is a
low-rank one of all layers; the rows of the text are held to those of the target before, where the
paper repeats the greedy text as a label.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models import corpus, llama, sampling
from models.corpus import Tokens
from models.loop import Stage, aligned, train
from models.train import divergence, scaled
from models.zoo.training import groups, texts
from models.zoo.training.low_rank import LowRank, adapted, held_out_loss
from models.zoo.training.script import run, write_figures

NAME = "cllm"
STAGES = [
    Stage("consistency", steps=2600, rows=6, length=224, start=1.0, end=0.0),
    Stage("hold", steps=1000, rows=6, length=224, start=0.6, end=0.0),
]
# The weight of the target's rows as they were.
_KEEP = {"consistency": 1.0, "hold": 6.0}
# Tokens of a state; of the texts' prompts; texts a batch of the drawing.
WINDOW, PROMPT, ROWS = 6, 64, 256
_PLACES = 24
_BATCHES = 40
# Of the corpus, beside the greedy texts of a batch: whose rows the target keeps.
_OTHERS = 2
# A token counts less the more wrong ones stand before it: it comes when those are right.
_LATER = 0.7


@torch.inference_mode()
def greedy_texts(weights: llama.Weights, prompts: Tensor, length: int) -> Tensor:
    """Continue prompts [rows, tokens] by the likeliest tokens, to [rows, length]."""
    rows, known = prompts.shape
    text = torch.cat([prompts, prompts.new_zeros(rows, length - known)], 1)
    given = (torch.arange(length) < known).expand(rows, -1)
    return sampling.continue_prompts(weights, llama.TARGET, text, given)


def own_greedy_texts(pair: Path, cache: Path, scale: float) -> Tokens:
    """Greedy texts of the target [texts, length + 1] after prompts of the corpus, drawn once."""
    folder, found = cache / "greedy", []
    folder.mkdir(parents=True, exist_ok=True)
    stream, weights = texts.stream(pair, cache), texts.frozen(pair, "target")
    batches = max(1, round(_BATCHES * scale))
    for number in range(batches):
        path = folder / f"{number:03}.npy"
        if not path.exists():
            starts = np.random.default_rng((7, number)).integers(len(stream) - PROMPT, size=ROWS)
            prompts = np.stack([stream[i : i + PROMPT] for i in starts]).astype(np.int64)
            drawn = greedy_texts(weights, torch.from_numpy(prompts), STAGES[0].length + 1)
            temporary = folder / "unfinished.npy"
            np.save(temporary, drawn.numpy().astype(np.uint16))
            temporary.rename(path)
            print(f"greedy texts {number + 1}/{batches}", flush=True)
        found.append(np.load(path))
    return np.concatenate(found)


def fit(pair: Path, cache: Path, output: Path, scale: float) -> None:
    """Train, continuing an interrupted run, and write the adapter's folder."""
    base = texts.frozen(pair, "target")
    model, frozen = LowRank(base), llama.Half(base, llama.TARGET)
    greedy = own_greedy_texts(pair, cache, scale)
    others = texts.mixed(pair, cache, scale)

    @torch.compile(dynamic=False)
    @torch.no_grad()
    def iterate(tokens: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """The target's predictions of a state, which are the next one, a place further."""
        half = llama.Half(model.weights(), llama.TARGET)
        table = half.table
        _, found = groups.states_of(
            half, F.embedding(tokens, table), F.embedding(states, table), anchors
        )
        return F.linear(found, table).argmax(-1)

    @torch.compile(dynamic=False)
    def losses(
        tokens: Tensor, states: Tensor, anchors: Tensor, weights: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        half = llama.Half(model.weights(), llama.TARGET)
        table = half.table
        own, found = groups.states_of(
            half, F.embedding(tokens, table), F.embedding(states, table), anchors
        )
        logits = F.linear(found, table).float()
        labels = groups.following(tokens, anchors + 1, WINDOW)
        each = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        wrong = (each * weights.flatten()).sum() / weights.sum().clamp(min=1.0)
        kept = []
        for text, rows in ((tokens, own), (other, llama.features(half, other, llama.TARGET))):
            with torch.no_grad():
                before = F.linear(llama.features(frozen, text, llama.TARGET), table).float()
            kept.append(divergence(before, F.linear(rows, table).float()))
        return wrong, kept[0] + kept[1]

    def objective(stage: Stage, tokens: Tensor) -> Tensor:
        tokens, other = tokens[: stage.rows], tokens[stage.rows :, :-1]
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        steps = 1 + int(torch.randint(3, (1,), generator=generator))
        anchors = groups.anchors_of(stage, tokens, _PLACES, WINDOW + 1 + steps, PROMPT)
        ends = torch.tensor([sampling.until_it_loops(row, PROMPT) for row in tokens.tolist()])
        tokens = tokens[:, :-1]
        picked = torch.randint(PROMPT, (len(tokens), _PLACES, WINDOW), generator=generator)
        states = tokens[torch.arange(len(tokens))[:, None, None], picked]
        for _ in range(steps):
            states, anchors = iterate(tokens, states, anchors), anchors + 1
        right = (states == groups.following(tokens, anchors, WINDOW)).cumprod(-1)
        places = anchors[:, None] + 2 + torch.arange(WINDOW)
        wrong_before = (right == 0).cumsum(-1) - 1
        weights = ((right == 0) & (places < ends[:, None, None])) * _LATER**wrong_before
        wrong, kept = losses(tokens, states, anchors, weights, other)
        return wrong + _KEEP[stage.name] * kept

    def draw(stage: Stage, step: int) -> Tensor:
        rows = Stage("", 1, _OTHERS, stage.length, 0.0, 0.0)
        return torch.cat([aligned(greedy, stage, step)[:, : stage.length + 1], others(rows, step)])

    seconds = train(
        model,
        scaled(list(STAGES), scale),
        draw,
        objective,
        cache / f"{NAME}.pt",
        model.optimizers(),
    )
    model.publish(output / NAME, pair, {})
    print(f"{NAME} trained in {seconds / 60:.1f} min", flush=True)


@torch.inference_mode()
def tokens_a_pass(pair: Path, weights: llama.Weights, rows: int = 64) -> float:
    """By Jacobi decoding of greedy texts after held-out prompts, each until it loops."""
    half = llama.Half(weights, llama.TARGET)
    held_out = [text for name, text in corpus.sources() if corpus.held_out(name)]
    stream = corpus.encode(texts.tokenizer_of(pair), held_out)
    starts = np.linspace(0, len(stream) - PROMPT - 1, rows).astype(int)
    prompts = torch.from_numpy(np.stack([stream[i : i + PROMPT] for i in starts]).astype("int64"))
    greedy = greedy_texts(weights, prompts, STAGES[0].length)
    tokens = passes = 0
    for row in greedy:
        end, at = sampling.until_it_loops(row.tolist(), PROMPT), PROMPT - 1
        state = row[PROMPT - WINDOW : PROMPT]
        # The text is a fixed point: what a pass keeps is what agrees with it.
        while at < end - WINDOW - 2:
            _, found = groups.states_of(
                half,
                F.embedding(row[None, : at + 1], half.table),
                F.embedding(state[None, None], half.table),
                torch.tensor([at]),
            )
            guesses = F.linear(found, half.table)[0, 0].argmax(-1)
            wanted = row[at + 1 : at + 1 + WINDOW]
            kept = int((state == wanted).cumprod(0).sum())
            left = guesses[kept:]
            state = torch.cat([left, left[-1:].expand(kept)]) if kept < WINDOW else wanted
            at, tokens, passes = at + kept + 1, tokens + kept + 1, passes + 1
    return round(tokens / passes, 4)


def report(pair: Path, output: Path) -> None:
    """Measure Jacobi decoding and the held-out loss before and after; write the figures."""
    figures: dict[str, Any] = {}
    for name, weights in (
        ("before", texts.frozen(pair, "target")),
        ("after", adapted(pair, output / NAME)),
    ):
        figures[name] = {
            "tokens_a_pass": tokens_a_pass(pair, weights),
            "held_out_loss": held_out_loss(pair, weights),
        }
    write_figures(output, NAME, figures)


if __name__ == "__main__":
    run(NAME, __doc__, fit, report)
