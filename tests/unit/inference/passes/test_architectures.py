"""The parity matrix: every supported architecture against its own plain forward passes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.errors import StartupError
from tandem.inference.passes import torch_llama as llama
from tandem.inference.passes.torch_llama import LlamaPass
from tests.support.decoders import decoder_over
from tests.support.models.architectures import (
    DOCUMENT,
    KINDS,
    LLAMA,
    REFUSED,
    SUPPORTED,
    Architecture,
    Refused,
    build,
    document,
    light,
    one_layer,
)
from tests.support.models.greedy import NEAR_TIE, Reference
from tests.support.models.parity import (
    TOLERANCE,
    differences,
    plain,
    plain_logits,
    ragged_logits,
    random_texts,
    worst_difference,
    worst_with_states,
)
from tests.support.models.planted import (
    Mistake,
    count_positions_along_the_batch,
    forget_causality,
    widen_the_window,
)
from tests.support.models.tiny import Text, make_drafter, make_target, running, speculate

OTHERS = pytest.mark.campaign(
    "greedy texts of every architecture, and mutants of its positions and windows",
    "six architectures, and mutants of seven; the logits and trees of each (this file, "
    "unit/inference/kv)",
)

pytestmark = pytest.mark.real_time  # the engine has its thread

NEW_TOKENS = 16

ROPE = {"rope_theta": 10000.0, "factor": 2.0}

every_architecture = pytest.mark.parametrize("row", SUPPORTED, ids=lambda row: row.model_type)


@every_architecture
def test_ragged_batches_with_rollbacks_give_the_plain_logits_and_hidden_states(
    row: Architecture,
) -> None:
    logits, states = worst_with_states(light(row))
    assert logits < TOLERANCE
    assert states < TOLERANCE


def test_the_llama_family_runs_as_plain_operators() -> None:
    flat = {row.model_type for row in SUPPORTED if LlamaPass.fits(build(row))}
    assert flat == {"llama", "mistral", "qwen2", "qwen3"}


def test_the_rotations_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "_FIRST_TURNS", 16)
    assert worst_difference(LLAMA) < TOLERANCE


@pytest.mark.parametrize(
    ("options", "flat"),
    [
        ({"attention_bias": True, "mlp_bias": True}, True),
        ({"tie_word_embeddings": True}, True),
        ({"rope_parameters": {**ROPE, "rope_type": "linear"}}, True),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, True),
        ({"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, False),
        ({"hidden_act": "gelu"}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_variants_of_llama(options: dict[str, Any], flat: bool) -> None:
    row = Architecture("variant", "llama", "", options)
    assert LlamaPass.fits(build(row)) == flat
    assert worst_difference(row) < TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_plain_operators_are_as_good_in_half_precision(model_type: str) -> None:
    """They round elsewhere than the modules, but not more."""
    row = next(row for row in SUPPORTED if row.model_type == model_type)
    texts = random_texts()
    exact = plain_logits(build(row), texts)
    half = build(row).to(torch.bfloat16)
    of_modules = (torch.cat(plain_logits(half, texts)).float() - torch.cat(exact)).abs().mean()
    decoder = decoder_over(half, row.name, cache_tokens=256)
    ours = differences(exact, ragged_logits(decoder, texts)).mean()
    assert 0 < ours < 1.2 * of_modules


# Masks are made alike for all: plain lists of operators and modules, with a window and without.
MASKED = ("llama", "mistral", "gemma2", "gpt2")


def mutants() -> list[Any]:
    """Positions and windows reach each architecture by its own code; those that are alike are tried
    in a campaign."""
    found: list[tuple[Architecture, Mistake]] = []
    for row in SUPPORTED:
        found.append((row, count_positions_along_the_batch))
        if row.slides:
            found.append((row, widen_the_window))
        if row.model_type in MASKED:
            found.append((row, forget_causality))
    return [
        pytest.param(
            row,
            one,
            id=f"{row.model_type}-{one.__name__}",
            marks=() if row in KINDS or row.model_type in MASKED else OTHERS,
        )
        for row, one in found
    ]


@pytest.mark.parametrize(("row", "mutant"), mutants())
def test_the_matrix_and_the_start_catch_mutants(
    row: Architecture, mutant: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutant(patch)
        with pytest.raises(StartupError, match="differs from a plain pass"):
            decoder_over(build(row), row.name)
        patch.setattr("tandem.inference.choice.candidates.require_agreement", lambda *_: None)
        assert worst_difference(row) > 100 * TOLERANCE


@torch.inference_mode()
def greedy_reference(model: PreTrainedModel, prompt: Sequence[int]) -> Reference:
    """What transformers generates; the model has its own attention and cache."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.cat(output.logits).topk(2).values
    gaps = (top[:, 0] - top[:, 1]).tolist()
    return Reference(list(prompt), output.sequences[0, len(prompt) :].tolist(), gaps)


def almost(model: PreTrainedModel) -> PreTrainedModel:
    """A drafter that agrees with a target now and then."""
    torch.manual_seed(3)
    drafter = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.015 * torch.randn_like(parameter))
    return drafter


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.model_type, marks=() if row in KINDS else OTHERS)
        for row in SUPPORTED
    ],
)
async def test_greedy_text_through_the_engines_is_what_transformers_generates(
    row: Architecture,
) -> None:
    # One prompt is shorter than the window and a chunk, one longer; the logits of more are above.
    model, prompts = build(one_layer(row)), random_texts()[::3]
    reference_model = plain(model)
    wanted = [greedy_reference(reference_model, prompt) for prompt in prompts]
    drafter, target = make_drafter(almost(model)), make_target(model)
    async with running(drafter, target):
        texts: list[Text] = await asyncio.gather(
            *(speculate(drafter, target, prompt, NEW_TOKENS) for prompt in prompts)
        )
    for reference, text in zip(wanted, texts, strict=True):
        assert reference.difference(text.token_ids) is None, f"not even a near-tie ({NEAR_TIE})"
        assert len(set(text.token_ids)) > 1, "too dull to show a difference"
    assert 0 < sum(text.accepted for text in texts) < sum(text.drafted for text in texts)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.model_type)
def test_what_cannot_be_served_is_refused_by_name(row: Refused) -> None:
    model = build(row)
    with pytest.raises(StartupError) as refusal:
        decoder_over(model, row.name)
    sentence = str(refusal.value)
    assert sentence.startswith(f"cannot serve {type(model).__name__} ({row.model_type}): ")
    assert row.reason in sentence


def test_longrope_is_served_up_to_where_its_frequencies_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    phi = next(row for row in SUPPORTED if row.model_type == "phi3")
    model = build(phi, rope_parameters=rope, original_max_position_embeddings=32)
    assert decoder_over(model, phi.name).about.max_length == 32


def test_the_document_is_what_the_matrix_says() -> None:
    command = "run python -m tests.support.models.architectures"
    assert DOCUMENT.read_text(encoding="utf-8") == document(), command
