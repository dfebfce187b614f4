"""Texts that are too long for a drafter, over fake services."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

# The target holds 1,000.
DRAFTED = 100


@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize("verifier", ["block", "greedy_block"])
@pytest.mark.parametrize("tokens", [DRAFTED - 1, DRAFTED])
async def test_what_a_drafter_cannot_hold_is_decoded_plainly(
    gamma: int | str, verifier: str, tokens: int
) -> None:
    drafter, target = FakeDrafter(max_length=DRAFTED), FakeTarget()
    drafted = tokens < DRAFTED
    async with orchestrate(drafter, target, gamma=gamma) as stub:
        reply = await stub.Complete(
            request(
                stopping=pb.Stopping(max_new_tokens=tokens),
                speculation=pb.Speculation(verifier=verifier),
            )
        )
    assert list(reply.token_ids) == target.text(tokens)
    assert drafter.opened == drafted
    assert (reply.summary.drafted_tokens > 0) == drafted
    speculation = reply.summary.effective.speculation
    assert (speculation.HasField("gamma") and speculation.gamma == 0) == (not drafted)
    assert not reply.summary.drafter_lost


async def test_a_small_drafter_does_not_shorten_texts() -> None:
    drafter, target = FakeDrafter(max_length=DRAFTED), FakeTarget()
    prompt = [1] * (DRAFTED - 10)
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(
            request(prompt_token_ids=prompt, stopping=None, speculation=None)
        )
    assert list(reply.token_ids) == target.text(256)
    assert (drafter.opened, target.opened) == (0, 1)


@pytest.mark.parametrize(
    ("gamma", "tokens", "sentence"),
    [
        (4, DRAFTED, "exceed the 100 tokens that a sequence may hold beside drafts; gamma 0"),
        (0, 1000, "exceed the 1000 tokens that a sequence may hold"),
        (None, 1000, "exceed the 1000 tokens that a sequence may hold"),
    ],
)
async def test_drafts_that_were_asked_for_need_their_room(
    gamma: int | None, tokens: int, sentence: str
) -> None:
    drafter, target = FakeDrafter(max_length=DRAFTED), FakeTarget()
    asked: dict[str, Any] = {} if gamma is None else {"gamma": gamma}
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(
                request(
                    stopping=pb.Stopping(max_new_tokens=tokens),
                    speculation=pb.Speculation(**asked),
                )
            )
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in str(refused.value.details())
    assert (drafter.opened, target.opened) == (0, 0)
