"""Hidden states beside logits: which may be named, and that nobody pays who asks for none."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch
from torch import Tensor

from tandem.engine.answers import ScoredRows
from tandem.engine.asks import Steps, Take
from tandem.engine.job import Job
from tandem.engine.stepper import Stepper
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.hidden_states import layers_from
from tandem.inference.output import PassOutput
from tandem.inference.passes import torch_llama
from tests.support.decoders import decoder_over
from tests.support.devices.recording import Recording
from tests.support.models.architectures import LLAMA, SUPPORTED, Architecture, build
from tests.support.models.parity import random_texts

GPT2 = next(row for row in SUPPORTED if row.model_type == "gpt2")
# By the plain list of operators, and by the modules of transformers.
BOTH = pytest.mark.parametrize("row", [LLAMA, GPT2], ids=lambda row: row.model_type)


@pytest.mark.parametrize(
    ("text", "layers"), [("none", ()), ("last", (3,)), ("0,2,1", (0, 2, 1)), ("2,last", (2, 3))]
)
def test_layers_are_named_by_number_and_the_heads_input_by_a_word(
    text: str, layers: tuple[int, ...]
) -> None:
    assert layers_from(text, build(LLAMA)) == layers


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("4", "no layer 4: its layers are 0 (the embedding), 1 to 2, and 'last'"),
        ("3", "no layer 3"),  # the head's input has a name, so that a setting fits any model
        ("1,1", "each once"),
        ("0,1,2,last,last", "at most 4 layers"),
    ],
)
def test_other_layers_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(StartupError) as refused:
        layers_from(text, build(LLAMA))
    assert sentence in str(refused.value)


def operators(decoder: Decoder, states: int) -> list[str]:
    cache = decoder.reserve(8)
    assert cache is not None
    recording = Recording()
    with torch.inference_mode(), recording:
        decoder.forward([Feed(cache, [1, 2, 3], 2, states=states)])
    decoder.release(cache)
    return [str(operator) for operator, *_ in recording.operators]


@BOTH
def test_who_asks_for_none_pays_for_none(row: Architecture) -> None:
    without = operators(decoder_over(build(row), "tiny"), 0)
    decoder = decoder_over(build(row), "tiny", states_of="1,2,last")
    assert operators(decoder, 0) == without
    added = Counter(operators(decoder, 2)) - Counter(without)
    assert added["aten.index_select.default"] == 3, "one a layer"
    assert added["aten.stack.default"] == 1


@BOTH
def test_a_decoder_that_was_loaded_for_none_gives_none(row: Architecture) -> None:
    decoder = decoder_over(build(row), "tiny")
    cache = decoder.reserve(8)
    assert cache is not None
    with pytest.raises(ValueError, match="gives no hidden states"):
        decoder.forward([Feed(cache, [1, 2], 1, states=1)])
    with torch.inference_mode():
        assert decoder.forward([Feed(cache, [1, 2], 1)]).states is None


@pytest.mark.parametrize("part", ["layer", "rows"])
def test_the_start_refuses_other_states(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits: Tensor, states: Tensor | None = None) -> PassOutput:
        return PassOutput(
            logits, None if states is None else states.flip(1 if part == "layer" else 0)
        )

    monkeypatch.setattr(torch_llama, "PassOutput", wrong)
    with pytest.raises(StartupError, match="differs from a plain pass"):
        decoder_over(build(LLAMA), "tiny", states_of="1,2")


def test_the_last_one_is_the_second_behind_the_final_norm() -> None:
    model, (text, *_) = build(LLAMA), random_texts()
    norm, head = model.model.norm, model.lm_head
    decoder = decoder_over(model, "tiny", states_of="2,last")
    cache = decoder.reserve(len(text))
    assert cache is not None
    with torch.inference_mode():
        output = decoder.forward([Feed(cache, text, len(text), states=len(text))])
        assert output.states is not None
        before, behind = output.states.unbind(1)
        assert torch.allclose(norm(before), behind, atol=1e-5)
        assert torch.allclose(head(behind), output.logits, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 7, 30])
@torch.inference_mode()
def test_those_of_a_prompts_end_are_kept_chunk_by_chunk(chunk: int) -> None:
    """Of as many positions as were asked for, however the prompt came in; beside another text that
    asks for none."""
    decoder = decoder_over(build(LLAMA), "tiny", states_of="1,last")
    texts = [[i * 7 % 60 for i in range(20)], [5, 1, 4], [3] * 9]
    wanted = [11, 3, 0]
    jobs = []
    for text, states in zip(texts, wanted, strict=True):
        cache = decoder.reserve(20)
        assert cache is not None
        job: Job[ScoredRows] = Job(None, _taken(decoder, Feed(cache, text, 1, states=states)))
        job.done = asyncio.Future(loop=asyncio.new_event_loop())
        job.resume()
        jobs.append(job)
    stepper = Stepper(decoder.device)
    while pending := [job for job in jobs if not job.over]:
        for job in pending:
            job.chunk = min(job.tokens, chunk)
        stepper.step(pending)
    for job, text, states in zip(jobs, texts, wanted, strict=True):
        assert job.error is None
        assert job.result is not None
        if not states:
            assert job.result.states is None
            continue
        cache = decoder.reserve(len(text))
        assert cache is not None
        whole = decoder.forward([Feed(cache, text, 1, states=states)])
        assert whole.states is not None
        assert job.result.states is not None
        assert torch.allclose(job.result.states, whole.states, atol=1e-4)


def _taken(decoder: Decoder, feed: Feed) -> Steps[ScoredRows]:
    scored: ScoredRows = yield Take(decoder, feed)
    return scored
