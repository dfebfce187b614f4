"""Messages of the two internal protocols, and the status that a sequence ends with."""

from __future__ import annotations

from typing import Any

import grpc

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.target.v1 import target_pb2
from tests.support.wire.talk import Talk

INVALID = grpc.StatusCode.INVALID_ARGUMENT
WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION
SAMPLING = common_pb2.Sampling(seed=0)


def carry_of(log_ratio: float, count: int) -> common_pb2.VerifierCarry:
    level = common_pb2.VerifierCarry.Level(log_ratio=log_ratio, count=count)
    return common_pb2.VerifierCarry(levels=[level])


def open_draft(**changes: Any) -> drafter_pb2.SequenceRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "token_ids": [1, 2, 3],
        "sampling": SAMPLING,
        "target_vocab_size": 5,
        "max_new_tokens": 20,
    }
    return drafter_pb2.SequenceRequest(open=drafter_pb2.OpenSequence(**(fields | changes)))


def draft_step(**changes: Any) -> drafter_pb2.SequenceRequest:
    fields: dict[str, Any] = {"round": 1, "position": 3, "new_token_ids": [4], "gamma": 3}
    return drafter_pb2.SequenceRequest(draft=drafter_pb2.DraftStep(**(fields | changes)))


def open_verify(**changes: Any) -> target_pb2.SequenceRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "token_ids": [1, 2, 3],
        "sampling": SAMPLING,
        "verifier": "block",
        "max_new_tokens": 20,
    }
    return target_pb2.SequenceRequest(open=target_pb2.OpenSequence(**(fields | changes)))


def verify_step(**changes: Any) -> target_pb2.SequenceRequest:
    one_hot = common_pb2.Draft(token_ids=[0, 1])
    fields: dict[str, Any] = {"round": 1, "position": 4, "draft": one_hot}
    return target_pb2.SequenceRequest(verify=target_pb2.VerifyStep(**(fields | changes)))


async def status_of(talk: Talk, *requests: Any) -> tuple[grpc.StatusCode, str]:
    """Send requests, reading an answer to each, until the sequence ends; then end the stream."""
    for request in requests:
        if await talk.ask(request) is grpc.aio.EOF:
            break
    else:
        await talk.call.done_writing()
    end = await talk.end()
    talk.cancel()
    return end
