"""Services without a model: they draft and accept by arithmetic. Free of torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc

VOCAB_SIZE = 100


def model_info(**changes: Any) -> common_pb2.ModelInfo:
    fields: dict[str, Any] = {
        "model": "fake",
        "protocol_version": 1,
        "vocab_size": VOCAB_SIZE,
        "max_length": 1000,
        "max_gamma": 8,
        "max_sequences": 8,
        "dtype": "float32",
        "device": "cpu",
    }
    return common_pb2.ModelInfo(**(fields | changes))


class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Drafts the number that follows, as one-hot rows.

    Attributes:
        before_draft: called before each draft with its round; may raise.
    """

    def __init__(self, **changes: Any) -> None:
        self.info = model_info(**changes)
        self.before_draft: Callable[[int], None] = lambda round_: None
        self.ended = 0

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        tokens: list[int] = []
        try:
            async for request in request_iterator:
                if request.HasField("close"):
                    return
                if request.HasField("open"):
                    tokens = list(request.open.token_ids)
                    yield drafter_pb2.DraftResponse(opened=drafter_pb2.OpenedSequence())
                    continue
                step = request.draft
                assert step.position == len(tokens)
                self.before_draft(step.round)
                tokens += step.new_token_ids
                drafted = [(tokens[-1] + 1 + i) % VOCAB_SIZE for i in range(step.gamma)]
                draft = common_pb2.Draft(token_ids=drafted, support_sizes=[0] * step.gamma)
                yield drafter_pb2.DraftResponse(
                    drafted=drafter_pb2.DraftedStep(
                        round=step.round, position=len(tokens), draft=draft
                    )
                )
        finally:
            self.ended += 1

    async def GetModelInfo(
        self, request: drafter_pb2.GetModelInfoRequest, context: Any
    ) -> drafter_pb2.GetModelInfoResponse:
        return drafter_pb2.GetModelInfoResponse(info=self.info, drafter="fake")


class FakeTarget(target_pb2_grpc.TargetServiceServicer):
    """Counts upwards, but says 0 after each multiple of `wraps`."""

    def __init__(self, wraps: int = 7, **changes: Any) -> None:
        self.info = model_info(**changes)
        self.wraps = wraps
        self.ended = 0

    def follow(self, token: int) -> int:
        return 0 if token and token % self.wraps == 0 else token + 1

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        tokens: list[int] = []
        try:
            async for request in request_iterator:
                if request.HasField("close"):
                    return
                if request.HasField("open"):
                    tokens = list(request.open.token_ids)
                    tokens.append(self.follow(tokens[-1]))
                    opened = target_pb2.OpenedSequence(token_id=tokens[-1])
                    yield target_pb2.VerifyResponse(opened=opened)
                    continue
                step = request.verify
                assert step.position == len(tokens)
                accepted = 0
                for token in step.draft.token_ids:
                    if token != self.follow(tokens[-1]):
                        break
                    tokens.append(token)
                    accepted += 1
                tokens.append(self.follow(tokens[-1]))
                yield target_pb2.VerifyResponse(
                    verdict=target_pb2.Verdict(
                        round=step.round,
                        position=len(tokens),
                        num_accepted=accepted,
                        next_token_id=tokens[-1],
                        overlaps=[1.0] * len(step.draft.token_ids),
                    )
                )
        finally:
            self.ended += 1

    async def GetModelInfo(
        self, request: target_pb2.GetModelInfoRequest, context: Any
    ) -> target_pb2.GetModelInfoResponse:
        return target_pb2.GetModelInfoResponse(
            info=self.info, verifiers=["block", "greedy_block", "token"]
        )

    async def GetTokenizer(self, request: target_pb2.GetTokenizerRequest, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no tokenizer")


async def serve_fakes(
    drafter: FakeDrafter, target: FakeTarget
) -> tuple[list[grpc.aio.Server], list[str]]:
    """Both on free ports: the servers, and the drafter's and the target's address."""
    servers, addresses = [grpc.aio.server(), grpc.aio.server()], []
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(drafter, servers[0])
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, servers[1])
    for server in servers:
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
    return servers, addresses
