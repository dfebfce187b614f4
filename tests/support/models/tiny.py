"""Tiny models with random weights, and their engines: real decoders that load in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from drafter_svc.settings import DrafterSettings
from tandem.drafting.ahead.prepare import Ahead, room_for
from tandem.drafting.choice.built_in import built_in, recipe_of
from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.drafter import Checkpoint, Drafter, DraftSequence, go_on
from tandem.engine.admission import Admission, AdmissionLimits, RoomWanted
from tandem.engine.answers import Decision
from tandem.engine.asks import DrawTogether, Score, Steps, Truncation
from tandem.engine.engine import Engine
from tandem.engine.schedule import BatchLimits
from tandem.engine.stepper import Stepper
from tandem.errors import OutOfRoom
from tandem.inference.choice.choose import EngineName
from tandem.inference.decoder import Decoder
from tandem.inference.model import Model
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Feedback
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.verification import VERIFIERS
from target_svc import round as rounds
from target_svc.round import TargetRequest, TargetSequence
from tests.support.decoders import decoder_over
from tests.support.models.heads import random_head

VOCAB_SIZE = 5
GREEDY = Sampling(temperature=0)
_PLACES = AdmissionLimits(max_sequences=64, max_waiting=64, wait_seconds=60)
_BUDGET = BatchLimits(token_budget=512, prefill_chunk=16)


def random_llama(seed: int, vocab_size: int = VOCAB_SIZE, layers: int = 1) -> PreTrainedModel:
    """A Llama, mostly of one layer, whose distributions are far from flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def noisy(model: Path, share: float, seed: int) -> PreTrainedModel:
    """Other weights near those of a checkpoint."""
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * share)
    return found


def save_random_llama(
    folder: Path, seed: int, vocab_size: int = VOCAB_SIZE, layers: int = 1
) -> Path:
    """Save such a model as a checkpoint without tokenizer files."""
    random_llama(seed, vocab_size, layers).save_pretrained(folder)
    return folder


class TargetEngine(Engine):
    """A target's engine with its model; its rounds are awaitable."""

    def __init__(self, decoder: Decoder, places: AdmissionLimits, budget: BatchLimits) -> None:
        admission = Admission((decoder,), places)
        super().__init__("target-engine", admission, budget, Stepper(decoder.device))
        self.decoder = decoder

    async def begin(
        self,
        sequence: TargetSequence,
        round_: int,
        capacity: int,
        least: int | None = None,
        *,
        resumes: bool = False,
    ) -> Decision | None:
        steps = rounds.open_(self.decoder, sequence, round_, resumes=resumes)
        return (await self.open(sequence, steps, RoomWanted(capacity, least)))[0]

    async def verify(self, sequence: TargetSequence, round_: int, draft: Draft) -> Decision:
        steps = rounds.verify(self.decoder, sequence, round_, draft, sequence.request.feedback)
        return (await self.run(sequence, steps))[0]


class DrafterEngine(Engine):
    """A drafter's engine with its models; its drafts are awaitable."""

    def __init__(
        self,
        decoder: Any,
        places: AdmissionLimits,
        budget: BatchLimits,
        others: Sequence[Model] = (),
    ) -> None:
        admission = Admission((decoder, *others), places)
        super().__init__("drafter-engine", admission, budget, Stepper(decoder.device))
        self.decoder = decoder
        self.drafter: Drafter = ModelDrafter(decoder, Truncation(0.999, 512))
        # Drafted tokens that may be prepared, how what was prepared came, and when to stop.
        self.ahead_nodes = 0
        self.came: list[PreparedOutcome | None] = []
        self.steps_ahead: Callable[[], int] = lambda: MANY
        self._aheads: dict[DraftSequence, Ahead] = {}

    async def begin(self, sequence: DraftSequence, capacity: int) -> None:
        if self.ahead_nodes:
            sequence.nodes += room_for(self.ahead_nodes, capacity)
            self._aheads[sequence] = Ahead(self.drafter, sequence, capacity)
        await self.open(sequence, self.drafter.open(sequence), RoomWanted(capacity))

    async def draft(
        self,
        sequence: DraftSequence,
        round_: int,
        news: Sequence[int],
        gamma: int,
        budget: int = 0,
        feedback: Sequence[Feedback] = (),
    ) -> Draft:
        ahead, size = self._aheads.get(sequence), DraftSize(gamma, budget)
        if ahead is None:
            steps = go_on(self.drafter, sequence, round_, news, size, feedback)
            return (await self.run(sequence, steps))[0]
        made, _ = await self.run(sequence, ahead.go_on(round_, news, size, feedback))
        draft = made.draft
        self.came.append(made.outcome)
        steps_ahead = ahead.prepare(round_, draft, size, self.ahead_nodes)
        prepared = first_of(steps_ahead, self.steps_ahead())
        with suppress(asyncio.CancelledError):
            await self.run_idle(sequence, prepared)
        return draft


# More passes than anything takes.
MANY = 1 << 30


def first_of(steps: Steps[None], passes: int) -> Steps[None]:
    """The steps up to a pass, as if they were cancelled then."""
    answer: Any = None
    with closing(steps):
        while True:
            try:
                ask = steps.send(answer)
            except StopIteration:
                return
            passes -= isinstance(ask, (Score, DrawTogether))
            if passes < 0:
                return
            answer = yield ask


def make_target(
    model: PreTrainedModel,
    *,
    cache_tokens: int = 4096,
    places: AdmissionLimits = _PLACES,
    budget: BatchLimits = _BUDGET,
    engine: EngineName = "torch",
    states_of: str = "none",
    probe_tokens: int = 0,
) -> TargetEngine:
    """A target's engine over a model, not started; with so many extra embeddings."""
    extra = None
    if probe_tokens:
        torch.manual_seed(5)
        extra = torch.randn(probe_tokens, model.config.hidden_size)
    decoder = decoder_over(
        model,
        "target",
        cache_tokens=cache_tokens,
        engine=engine,
        states_of=states_of,
        trees=probe_tokens > 0,
        extra_embeddings=extra,
    )
    return TargetEngine(decoder, places, budget)


def make_drafter(
    model: PreTrainedModel,
    *,
    cache_tokens: int = 4096,
    places: AdmissionLimits = _PLACES,
    budget: BatchLimits = _BUDGET,
    engine: EngineName = "torch",
) -> DrafterEngine:
    """A drafter's engine over a model, not started."""
    decoder = decoder_over(model, "drafter", cache_tokens=cache_tokens, engine=engine)
    return DrafterEngine(decoder, places, budget)


def make_method(name: str, settings: DrafterSettings | None = None) -> DrafterEngine:
    """A drafter's engine over random models, with a method of its built-in recipe, or with the
    recipe that the settings name."""
    settings = settings or DrafterSettings()
    recipe = recipe_of(settings) if settings.recipe else built_in(name, settings)
    # At least one, even if the method needs none: its sequences then reserve unused memory.
    models: list[Model] = [
        random_head(name, random_llama(1))
        if checkpoint.head
        else decoder_over(random_llama(seed), "drafter", cache_tokens=4096, engine="torch")
        for seed, checkpoint in enumerate(recipe.checkpoints or (Checkpoint(),), 2)
    ]
    engine = DrafterEngine(models[0], _PLACES, _BUDGET, models[1:])
    engine.drafter = recipe.make(models, Truncation(0.999, 512))
    return engine


@asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[None]:
    """Start engines on the running loop, and stop them at the end."""
    for engine in engines:
        engine.start()
    try:
        yield
    finally:
        for engine in engines:
            await asyncio.to_thread(engine.stop)


@dataclass
class Text:
    """What a sequence emitted.

    Attributes:
        token_ids: in order.
        rounds: number of rounds, without the prefill.
        drafted: drafted tokens of all rounds.
        accepted: accepted tokens of all rounds.
        found: of the prompt, by the target and by the drafter's first model.
        given_back: how often the target needed its memory.
    """

    token_ids: list[int] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    found: tuple[int, int] = (0, 0)
    given_back: int = 0


async def speculate(
    drafter: DrafterEngine | None,
    target: TargetEngine,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    gamma: int = 4,
    budget: int = 0,
    rule: str = "block",
    sampling: Sampling = GREEDY,
    salt: str | None = None,
    grows: bool = False,
) -> Text:
    """The orchestrator's loop in this process; without a drafter each round has gamma 0. Without a
    salt no prefix is shared. Where it `grows`, the target's sequence begins with room for its
    prompt, and may be given back."""
    probes, told_of = 0, None
    if drafter is not None and (wanted := drafter.drafter.traits.feedback).told:
        told_of = replace(wanted, prompt_tokens=1, columns=(0,) if wanted.layers else ())
        probes = wanted.probes
    nodes = probes and probes + max(gamma, budget)
    request = TargetRequest(sampling, VERIFIERS[rule], nodes, feedback=told_of, salt=salt)
    sequence = TargetSequence(list(prompt), request)
    guess = DraftSequence(list(prompt), sampling, target.decoder.vocab_size)
    guess.salt = salt
    capacity = len(prompt) + max_new_tokens + max(gamma, budget) + probes
    text = Text()

    async def open_(round_: int, *, resumes: bool = False) -> Decision | None:
        nonlocal sequence
        emitted = [*prompt, *text.token_ids]
        least = len(emitted) if grows else None
        while True:
            sequence = TargetSequence(list(emitted), request, sequence.carry)
            try:
                return await target.begin(sequence, round_, capacity, least, resumes=resumes)
            except OutOfRoom:
                text.given_back += 1
                target.release(sequence)

    async def verify(round_: int, draft: Draft) -> Decision:
        while True:
            try:
                return await target.verify(sequence, round_, draft)
            except OutOfRoom:
                text.given_back += 1
                target.release(sequence)
                await open_(round_ - 1, resumes=True)

    try:
        opened = await open_(0)
        assert opened is not None
        if drafter is not None:
            await drafter.begin(guess, capacity)
        held = (sequence.caches[0], *guess.caches[:1])
        text.found = held[0].found, held[-1].found
        news = text.token_ids = [opened.next_token]
        feedback = opened.feedback
        while (left := max_new_tokens - len(text.token_ids)) > 0:
            text.rounds += 1
            draft = Draft.certain(())
            if drafter is not None:
                depth = min(gamma, left)
                told = [] if feedback is None else [feedback]
                draft = await drafter.draft(guess, text.rounds, news, depth, budget, told)
            verdict = await verify(text.rounds, draft)
            kept = [draft.token_ids[place - 1] for place in draft.path_to(verdict.place)]
            news, feedback = [*kept, verdict.next_token], verdict.feedback
            text.token_ids = text.token_ids + news
            text.drafted += len(draft)
            text.accepted += verdict.num_accepted
    finally:
        target.release(sequence)
        if drafter is not None:
            drafter.release(guess)
    text.token_ids = text.token_ids[:max_new_tokens]
    return text
