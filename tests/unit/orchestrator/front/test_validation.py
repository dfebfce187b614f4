"""What requests become once every default is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.front.encoder import PromptEncoder
from orchestrator.front.queue import QueueLimits
from orchestrator.front.validation import Validator
from orchestrator.text.codec import TextCodec
from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest
from tandem.peers.replicas.compatibility import capabilities_of
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Generation, Request
from tandem.shaping.grammar import Grammars
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import Shaping
from tandem.target.v1 import target_pb2
from target_svc.messages import verifier_infos

LENGTH, VOCAB_SIZE, DEFAULT = 256, 64, 100


async def accepted(prompt_tokens: int, **fields: Any) -> Generation:
    """A request to a target alone."""
    info = common_pb2.ModelInfo(
        vocab_size=VOCAB_SIZE, max_length=LENGTH, max_message_bytes=1 << 20, shapes_logits=True
    )
    target = target_pb2.GetModelInfoResponse(info=info, verifiers=verifier_infos())
    codec = TextCodec(b"")
    encoder = PromptEncoder(codec, 1, QueueLimits(1, 1.0))
    validator = Validator(
        capabilities_of([target], []),
        "block",
        None,
        None,
        DEFAULT,
        codec,
        encoder,
        Grammars(bytes, VOCAB_SIZE, ()),
    )
    request = Request(**{"sampling": Sampling(), "prompt_ids": [1] * prompt_tokens, **fields})
    return await validator.accept(request, "id", TextRecord(), "")


@pytest.mark.parametrize("default", [None, 16])
async def test_a_default_number_of_tokens_is_cut_to_the_room(default: int | None) -> None:
    for prompt_tokens in (1, 150, 239, 240, 241, 255):
        found = await accepted(prompt_tokens, default_new_tokens=default)
        assert found.stopping.max_new_tokens == min(default or DEFAULT, LENGTH - prompt_tokens)


async def test_a_default_number_of_tokens_is_no_less_than_the_least_that_are_asked_for() -> None:
    for least, most in ((50, DEFAULT), (150, 150), (156, 156)):
        found = await accepted(100, sampling=Sampling(shaping=Shaping(min_tokens=least)))
        assert found.stopping.max_new_tokens == most


async def test_what_was_asked_for_is_not_cut() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_new_tokens: 241 prompt tokens and 16 new"):
        await accepted(241, max_new_tokens=16, default_new_tokens=16)
    with pytest.raises(InvalidRequest, match=r"^max_new_tokens: 256 prompt tokens"):
        await accepted(256)
    with pytest.raises(InvalidRequest, match="min_tokens must be at most"):
        await accepted(100, sampling=Sampling(shaping=Shaping(min_tokens=157)))
