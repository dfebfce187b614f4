"""Search the sublayers that a target may leave out when it drafts for itself:
`python -m models.zoo.skip_search --model models/target --output models/skip.json`.

Draft & Verify (Zhang et al., arXiv 2309.08168, section 3.2): Bayesian optimisation over sets of
sublayers, by tokens a second. Each trial drafts with what is left and verifies with the whole
model, beside plain decoding in turn; the objective is the ratio of the two, by the median over
prompts. At first each sublayer is left out alone, then ever more of them, the least missed first;
the optimiser goes on from there. An interrupted search continues.
"""

import argparse
import copy
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import Tensor
from transformers import PreTrainedModel

from models import corpus
from tandem.distillation.texts import read_records
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.description import describe
from tandem.inference.feed import Feed
from tandem.inference.fingerprint import fingerprints
from tandem.inference.loading.checkpoint import LoadedCheckpoint
from tandem.inference.loading.partial import ModelPart, take_part
from tandem.inference.loading.weights import read_model, read_tokenizer
from tandem.speculation.distribution import draw
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS

GAMMA, RULE = 4, "token"
# The best trials are measured again: the largest of noisy figures is too large.
LEADERS, AGAIN = 3, 4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 48, 32


@dataclass(frozen=True)
class Found:
    """What a trial measured.

    Attributes:
        gain: tokens a second over those of plain decoding, the median over prompts.
        overlap: of the part's rows with the whole model's.
        step: time of a pass of the part over one of the whole model.
        tokens: a round.
    """

    gain: float
    overlap: float
    step: float
    tokens: float


class Decoding:
    """Texts of a model, plain and with drafts of a part of itself.

    Args:
        model: the whole one.
        prompts: token ids, to continue at temperature 1.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[list[int]]) -> None:
        self._model, self._prompts = model, prompts
        self._room = PROMPT_TOKENS + NEW_TOKENS + 2 * GAMMA
        self._whole = self._decoder(copy.deepcopy(model), "whole")

    def _decoder(self, model: PreTrainedModel, name: str) -> Decoder:
        checkpoint = LoadedCheckpoint(model, describe(model, name))
        return Decoder(checkpoint, DecoderOptions(cache_tokens=2 * self._room))

    @property
    def layers(self) -> int:
        """Of the model."""
        return self._whole.about.layers

    @torch.inference_mode()
    def measure(self, part: ModelPart) -> Found:
        """Decode each prompt plainly and with drafts, in turn."""
        own = copy.deepcopy(self._model)
        take_part(own, part)
        drafter = self._decoder(own, "part")
        gains: list[float] = []
        overlaps: list[float] = []
        tokens: list[float] = []
        steps: tuple[list[float], list[float]] = ([], [])
        self._speculate(drafter, self._prompts[0], 0, [], ([], []))  # warms up
        for seed, prompt in enumerate(self._prompts):
            plain = self._plain(prompt, seed, steps[1])
            speed, round_ = self._speculate(drafter, prompt, seed, overlaps, steps)
            gains.append(speed / plain)
            tokens.append(round_)
        return Found(
            statistics.median(gains),
            statistics.fmean(overlaps),
            statistics.median(steps[0]) / statistics.median(steps[1]),
            statistics.fmean(tokens),
        )

    def _plain(self, prompt: list[int], seed: int, steps: list[float]) -> float:
        """Tokens a second without drafts; the time of each pass goes to `steps`."""
        generator = torch.Generator().manual_seed(seed)
        cache: Any = self._whole.reserve(self._room)
        self._whole.forward([Feed(cache, prompt[:-1], 0)])
        token, began = prompt[-1], time.perf_counter()
        for _ in range(NEW_TOKENS):
            since = time.perf_counter()
            row = self._whole.forward([Feed(cache, [token], 1)]).logits
            steps.append(time.perf_counter() - since)
            token = int(draw(row.softmax(-1), torch.rand(1, generator=generator)))
        spent = time.perf_counter() - began
        self._whole.release(cache)
        return NEW_TOKENS / spent

    def _speculate(
        self,
        drafter: Decoder,
        prompt: list[int],
        seed: int,
        overlaps: list[float],
        steps: tuple[list[float], list[float]],
    ) -> tuple[float, float]:
        """Tokens a second with drafts, and tokens a round."""
        generator = torch.Generator().manual_seed(seed)
        caches: list[Any] = [drafter.reserve(self._room), self._whole.reserve(self._room)]
        for decoder, cache in zip((drafter, self._whole), caches, strict=True):
            decoder.forward([Feed(cache, prompt[:-1], 0)])
        text, rounds, began = list(prompt), 0, time.perf_counter()
        while len(text) < len(prompt) + NEW_TOKENS:
            rows: list[Tensor] = []
            guess: list[int] = []
            news = text[caches[0].length :]
            for _ in range(GAMMA):
                since = time.perf_counter()
                rows.append(drafter.forward([Feed(caches[0], news, 1)]).logits.softmax(-1))
                steps[0].append(time.perf_counter() - since)
                news = [int(draw(rows[-1], torch.rand(1, generator=generator)))]
                guess += news
            fed = [text[-1], *guess]
            p = self._whole.forward([Feed(caches[1], fed, GAMMA + 1)]).logits.softmax(-1)
            q = torch.cat(rows)
            proposal = Proposal.from_dense(torch.tensor([guess]), q[None])
            uniforms = torch.rand(1, GAMMA + 1, generator=generator, dtype=torch.float64)
            verdict = VERIFIERS[RULE].verify(proposal, p[None], uniforms)
            kept = int(verdict.num_accepted)
            overlaps += torch.minimum(p[: kept + 1][:GAMMA], q[: kept + 1]).sum(-1).tolist()
            text += [*guess[:kept], int(verdict.next_token)]
            rounds += 1
            for cache in caches:
                cache.rollback(min(cache.length, len(text) - 1))
        spent = time.perf_counter() - began
        for decoder, cache in zip((drafter, self._whole), caches, strict=True):
            decoder.release(cache)
        count = len(text) - len(prompt)
        return count / spent, count / rounds


def names_of(layers: int) -> list[str]:
    """The sublayers, as the optimiser knows them."""
    return [f"{kind} {layer}" for layer in range(layers) for kind in ("attention", "mlp")]


def part_of(names: Sequence[str], scratch: Path) -> ModelPart:
    """The part without some sublayers."""
    sets: dict[str, list[int]] = {"attention": [], "mlp": []}
    for name in names:
        kind, layer = name.split()
        sets[kind].append(int(layer))
    scratch.write_text(json.dumps(sets))
    return ModelPart(skip=str(scratch))


def search(
    decoding: Decoding, study: optuna.Study, trials: int, minutes: float, scratch: Path
) -> None:
    """Run trials up to a number in all, or for so long."""
    names, began = names_of(decoding.layers), time.monotonic()

    def objective(trial: optuna.Trial) -> float:
        skipped = [name for name in names if trial.suggest_categorical(name, [False, True])]
        if sum(name.startswith("attention") for name in skipped) == decoding.layers:
            found = Found(0.0, 0.0, 1.0, 1.0)  # no attention is left: no draft
        else:
            found = decoding.measure(part_of(skipped, scratch))
        for key in ("overlap", "step", "tokens"):
            trial.set_user_attr(key, round(getattr(found, key), 4))
        print(
            f"trial {trial.number + 1}/{trials}: {len(skipped)} of {len(names)} sublayers out, gain"
            f" {found.gain:.3f}, overlap {found.overlap:.3f}, step {found.step:.2f}, tokens a round"
            f" {found.tokens:.2f}",
            flush=True,
        )
        return found.gain

    queued = False
    while (done := len(complete(study))) < trials and time.monotonic() - began < 60 * minutes:
        alone = {tuple(out_of(trial)): trial for trial in complete(study)}
        # A trial that was interrupted is tried again.
        if missing := [name for name in names if (name,) not in alone]:
            study.enqueue_trial({name: name == missing[0] for name in names})
        elif done < len(names) + len(names) // 2 and not queued:
            order = sorted(names, key=lambda name: -alone[name,].user_attrs["overlap"])
            for count in range(2, len(names)):
                if tuple(sorted(order[:count])) not in {tuple(sorted(key)) for key in alone}:
                    study.enqueue_trial({name: name in order[:count] for name in names})
            queued = True
        study.optimize(objective, n_trials=1)


def complete(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The trials that were measured."""
    return [trial for trial in study.trials if trial.state is optuna.trial.TrialState.COMPLETE]


def out_of(trial: optuna.trial.FrozenTrial) -> list[str]:
    """The sublayers that a trial left out."""
    return [name for name, skipped in trial.params.items() if skipped]


def best_of(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The set with the largest median gain: of one that was tried several times a single trial may
    have been lucky. To leave out nothing is no part."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        if trial["attention"] or trial["mlp"]:
            key = str((trial["attention"], trial["mlp"]))
            by_set.setdefault(key, []).append(trial)

    def median(key: str, own: Sequence[dict[str, Any]]) -> float:
        return round(float(statistics.median(one[key] for one in own)), 4)

    best = max(by_set.values(), key=lambda own: median("gain", own))
    figures = {key: median(key, best) for key in ("gain", "overlap", "step", "tokens")}
    return {"attention": best[0]["attention"], "mlp": best[0]["mlp"], **figures}


def told(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """A trial for the file."""
    skipped = sorted(out_of(trial))
    sets = {
        kind: [int(name.split()[1]) for name in skipped if name.startswith(kind)]
        for kind in ("attention", "mlp")
    }
    return {**sets, "gain": round(trial.value or 0.0, 4), **trial.user_attrs}


def prompts_for(model: str, file: str, count: int) -> list[list[int]]:
    """Beginnings of texts that the embedded pair was trained on; or the ends of the prompts of a
    file, as `tandem distill` takes it."""
    tokenizer = read_tokenizer(model)
    if file:
        records = read_records(Path(file), tokenizer)
        return [
            each.token_ids[: each.prompt or None][-PROMPT_TOKENS:].tolist()
            for each in records[:count]
        ]
    texts = [text for name, text in corpus.sources() if not corpus.held_out(name)]
    found = []
    for text in texts[:: max(1, len(texts) // count)][:count]:
        ids = tokenizer(text[:2000], add_special_tokens=False)["input_ids"]
        found.append(ids[:PROMPT_TOKENS])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m models.zoo.skip_search", description=__doc__)
    parser.add_argument("--model", default="models/target", help="checkpoint to search in")
    parser.add_argument("--output", type=Path, default=Path("models/skip.json"))
    parser.add_argument(
        "--journal", type=Path, default=Path(".cache/skip_search.journal"), help="of the trials"
    )
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", default="", help="a file as `tandem distill` takes it")
    parser.add_argument("--texts", type=int, default=PROMPTS, help="of a trial")
    options = parser.parse_args()
    if options.texts < 1:
        parser.error("--texts must be at least 1")
    torch.set_num_threads(options.threads)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    model = read_model(options.model, "cpu", "float32").eval()
    made_for = fingerprints(model, "").weights
    options.journal.parent.mkdir(parents=True, exist_ok=True)
    prompts = prompts_for(options.model, options.prompts, options.texts)
    # A trial on other prompts says nothing here.
    asked = hashlib.sha256(repr(prompts).encode()).hexdigest()
    study = optuna.create_study(
        study_name=f"{made_for}-{asked[:16]}",
        storage=JournalStorage(JournalFileBackend(str(options.journal))),
        sampler=optuna.samplers.TPESampler(seed=1),
        direction="maximize",
        load_if_exists=True,
    )
    decoding = Decoding(model, prompts)
    scratch = options.journal.with_suffix(".part.json")
    search(decoding, study, options.trials, options.minutes, scratch)
    trials = [told(trial) for trial in complete(study)]
    for trial in sorted(trials, key=lambda trial: -trial["gain"])[:LEADERS]:
        for _ in range(AGAIN):
            skipped = [f"attention {i}" for i in trial["attention"]]
            skipped += [f"mlp {i}" for i in trial["mlp"]]
            found = decoding.measure(part_of(skipped, scratch))
            again = {key: round(value, 4) for key, value in asdict(found).items()}
            trials.append({"attention": trial["attention"], "mlp": trial["mlp"], **again})
    best = best_of(trials)
    content = {**best, "made_for": made_for, "gamma": GAMMA, "rule": RULE, "trials": trials}
    options.output.write_text(json.dumps(content, indent=2) + "\n")
    pays = "" if best["gain"] > 1 else "; no set is faster than plain decoding"
    print(f"{options.output}: {best}{pays}", flush=True)


if __name__ == "__main__":
    main()
