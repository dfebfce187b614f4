"""What a target tells a drafter of its passes: hidden states of what was kept, on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.common.v1 import common_pb2
from tandem.errors import StartupError
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.wire.steps import INVALID, open_verify, status_of, verify_step
from tests.support.wire.talk import Talk

HALF, WHOLE = common_pb2.HIDDEN_DTYPE_BFLOAT16, common_pb2.HIDDEN_DTYPE_FLOAT32
PROMPT = [1, 2, 0, 3]
# Two draws at place 0, and one after each; as certain tokens.
TREE = common_pb2.Draft(token_ids=[2, 0, 3, 4], parents=[0, 0, 1, 2])


@pytest.fixture
async def target(random_pair: tuple[Path, Path]) -> AsyncIterator[Any]:
    """A target that gives what the first layer reads, what it writes, and what the head reads."""
    settings = TargetSettings(model=str(random_pair[1]), feedback="0,1,last", engine="torch")
    async with AsyncExitStack() as stack:
        server = await start(stack, make_target(settings))
        await server.ready()
        yield target_pb2_grpc.TargetServiceStub(await connect(stack, address_of(server)))


@pytest.fixture(scope="module")
def plain(random_pair: tuple[Path, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(random_pair[1]).eval()


def spec(layers: list[int], dtype: Any = WHOLE, prompt_tokens: int = 0) -> common_pb2.FeedbackSpec:
    return common_pb2.FeedbackSpec(layers=layers, hidden_dtype=dtype, prompt_tokens=prompt_tokens)


def top(count: int, at: Any = common_pb2.PREDICTED_AT_ALL) -> common_pb2.FeedbackSpec:
    return common_pb2.FeedbackSpec(top=count, predicted_at=at)


def states_of(feedback: common_pb2.Feedback, layers: int, dtype: Any = WHOLE) -> Tensor:
    """[positions, layers, width] of a message."""
    kind = np.dtype("<f4") if dtype == WHOLE else np.dtype("<i2")
    raw = np.frombuffer(feedback.hidden, kind).reshape(feedback.positions, layers, -1)
    found = torch.from_numpy(raw.astype(kind.newbyteorder("=")))
    return found if dtype == WHOLE else found.view(torch.bfloat16)


@torch.inference_mode()
def expected(plain: Any, text: list[int], layers: list[int]) -> Tensor:
    """[n, layers, width] by transformers."""
    found = plain(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    count = len(found) - 1
    return torch.stack([found[min(layer, count)][0] for layer in layers], 1)


async def test_the_handshake_names_layers_and_weights(target: Any) -> None:
    told = await target.GetModelInfo(target_pb2.GetModelInfoRequest())
    assert list(told.feedback_layers) == [0, 1, told.info.layers + 1]
    assert told.info.hidden_size > 0
    assert len(told.info.weights_fingerprint) == 64


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("branched", [False, True])
async def test_states_are_those_of_the_kept_path(
    target: Any, plain: Any, verifier: str, branched: bool
) -> None:
    """Of the token before place 0 and of each kept one, in the order of the text; rounds that ask
    for none bring none."""
    told = await target.GetModelInfo(target_pb2.GetModelInfoRequest())
    layers = [told.info.layers + 1, 0]  # another order than the target's
    kept = 0
    for seed in range(24):
        text, call = list(PROMPT), Talk(target.Verify())
        sampling = common_pb2.Sampling(seed=seed, temperature=30.0)
        opening = open_verify(
            token_ids=text,
            sampling=sampling,
            verifier=verifier,
            max_nodes=8 * branched,
            feedback=spec(layers, prompt_tokens=3),
            max_new_tokens=40,
        )
        opened = (await call.ask(opening)).opened
        feedback = opened.feedback
        assert (feedback.round, feedback.first, feedback.positions) == (0, 1, 3)
        states = expected(plain, text, layers)[1:]
        assert torch.allclose(states_of(feedback, 2), states, atol=1e-4)
        text.append(opened.token_id)
        for round_ in range(1, 6):
            draft = TREE if branched else common_pb2.Draft(token_ids=[4, 2, 0])
            asked = round_ != 3
            step = verify_step(round=round_, position=len(text), draft=draft, feedback=asked)
            verdict = (await call.ask(step)).verdict
            first = len(text) - 1
            text += path_of(draft, verdict.place)
            assert verdict.HasField("feedback") == asked
            if asked:
                feedback = verdict.feedback
                assert (feedback.round, feedback.first) == (round_, first)
                assert feedback.positions == verdict.num_accepted + 1
                states = expected(plain, text, layers)[first:]
                assert torch.allclose(states_of(feedback, 2), states, atol=1e-4)
                kept += verdict.num_accepted
            text.append(verdict.next_token_id)
        call.cancel()
    assert kept > 10, "too little was kept to tell paths apart"


def path_of(draft: common_pb2.Draft, place: int) -> list[int]:
    if not draft.parents:
        return list(draft.token_ids[:place])
    path: list[int] = []
    while place:
        path.insert(0, draft.token_ids[place - 1])
        place = draft.parents[place - 1]
    return path


async def test_halves_are_the_same_numbers_rounded(target: Any) -> None:
    found = []
    for dtype in (WHOLE, HALF):
        call = Talk(target.Verify())
        opening = open_verify(token_ids=PROMPT, feedback=spec([0, 1], dtype, 9))
        feedback = (await call.ask(opening)).opened.feedback
        assert feedback.positions == len(PROMPT), "no more than there are"
        found.append(states_of(feedback, 2, dtype))
        call.cancel()
    assert torch.equal(found[0].to(torch.bfloat16), found[1])


REFUSED = [
    (spec([5]), "open.feedback.layers holds layer 5; the target gives [0, 1, "),
    (spec([0, 1, 0]), "open.feedback.layers may hold 4 layers, each once"),
    (spec([0, 1, 2, 3, 4]), "open.feedback.layers may hold 4 layers, each once"),
    (spec([0], 0), "open.feedback.hidden_dtype 0 is unknown"),
    (spec([0], 7), "open.feedback.hidden_dtype 7 is unknown"),
    (spec([], 0, 3), "open.feedback.layers must not be empty where prompt_tokens or "),
    (top(257), "open.feedback.top must be 0..256, got 257"),
    (top(4, 0), "open.feedback.predicted_at 0 is unknown"),
    (top(4, 7), "open.feedback.predicted_at 7 is unknown"),
    (top(0), "open.feedback.predicted_at must be unset where top is 0"),
]


async def test_what_cannot_be_had_is_refused(target: Any) -> None:
    for feedback, sentence in REFUSED:
        code, details = await status_of(Talk(target.Verify()), open_verify(feedback=feedback))
        assert (code, sentence in details) == (INVALID, True), (sentence, details)


async def test_who_asked_for_none_at_the_start_gets_none_later(target: Any) -> None:
    call = Talk(target.Verify())
    opened = (await call.ask(open_verify())).opened
    assert not opened.HasField("feedback")
    plain = (await call.ask(verify_step())).verdict
    assert not plain.HasField("feedback")
    call.cancel()
    code, details = await status_of(
        Talk(target.Verify()), open_verify(), verify_step(feedback=True)
    )
    assert (code, details) == (INVALID, "verify.feedback must be unset: open asked for none")


async def test_a_prompts_states_must_fit_a_message(random_pair: tuple[Path, Path]) -> None:
    settings = TargetSettings(
        model=str(random_pair[1]), feedback="0", max_message_mib=1, max_length=512
    )
    async with AsyncExitStack() as stack:
        server = await start(stack, make_target(settings))
        await server.ready()
        stub: Any = target_pb2_grpc.TargetServiceStub(await connect(stack, address_of(server)))
        info = (await stub.GetModelInfo(target_pb2.GetModelInfoRequest())).info
        assert 4 * info.hidden_size * 512 < info.max_message_bytes, "or the test needs a longer one"
        call = Talk(stub.Verify())
        opening = open_verify(token_ids=[1] * 400, feedback=spec([0], WHOLE, 400))
        assert (await call.ask(opening)).opened.feedback.positions == 400
        call.cancel()


async def test_a_target_without_such_a_layer_does_not_start(random_pair: tuple[Path, Path]) -> None:
    settings = TargetSettings(model=str(random_pair[1]), feedback="9")
    async with AsyncExitStack() as stack:
        server = await start(stack, make_target(settings))
        with pytest.raises(StartupError, match="the model has no layer 9"):
            await server.ready()


def test_a_setting_that_names_no_layers_is_refused() -> None:
    with pytest.raises(ValidationError, match="feedback"):
        TargetSettings(feedback="first")
