"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.expand import Shape


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Attributes:
        shape: of the expanded target.
        drafter_shape: of the expanded drafter; None takes the embedded one as it is.
        device: of both models, as torch names it.
        published: prompts for the published model, "chats" or "quotes", with drafts by lookup in
            the prompt; empty takes the expanded pair.
        gammas: draft lengths to choose from.
        temperatures: of the texts.
        loads: texts at once, and new tokens of each.
        choosing_turns: most turns for choosing draft lengths.
        turns: most turns to measure afterwards.
        law_texts: texts of each sample.
        law_tokens: tokens of each of those texts.
        budget_s: for all texts after the warm-up; excludes setting up and loading.
        setup_s: most time for each command that makes an environment.
    """

    shape: Shape
    gammas: tuple[int, ...]
    temperatures: tuple[float, ...]
    loads: tuple[tuple[int, int], ...]
    choosing_turns: int
    turns: int
    law_texts: int
    law_tokens: int
    budget_s: float
    setup_s: float = 600.0
    drafter_shape: Shape | None = None
    device: str = "cpu"
    published: str = ""


FULL = Plan(
    shape=Shape(layers=12, width=768, heads=12, kv_heads=12, mlp=2176),
    gammas=(4, 8, 16),
    temperatures=(0.0, 1.0),
    loads=((1, 128), (4, 64), (16, 64)),
    choosing_turns=5,
    turns=24,
    law_texts=2000,
    law_tokens=6,
    budget_s=30 * 60,
)
QUICK = Plan(
    shape=Shape(layers=6, width=384, heads=6, kv_heads=6, mlp=1024),
    gammas=(4, 8),
    temperatures=(0.0, 1.0),
    loads=((1, 16), (4, 8)),
    choosing_turns=1,
    turns=2,
    law_texts=100,
    law_tokens=4,
    budget_s=60,
)
# SmolLM2-135M-Instruct, from PyPI.
PUBLISHED = replace(
    FULL, gammas=(3, 6), loads=((1, 64), (16, 64)), choosing_turns=2, turns=7, law_texts=0
)
# As large as Llama 2 7B and Qwen2.5 0.5B, with a key head for each query head; without their
# vocabularies.
GPU = replace(
    FULL,
    shape=Shape(layers=32, width=4096, heads=64, kv_heads=64, mlp=11008),
    drafter_shape=Shape(layers=24, width=896, heads=28, kv_heads=28, mlp=4864),
    device="cuda",
    loads=((1, 128), (16, 128)),
    choosing_turns=2,
    turns=9,
    budget_s=5 * 60,
)
