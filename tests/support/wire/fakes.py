"""Services without a model: they draft and accept by arithmetic. Free of torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.front.service import make_service
from orchestrator.settings import OrchestratorSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.peers.grpc.calls import CountingOn
from tandem.peers.grpc.deadlines import Deadlines
from tandem.rpc.channel import CLIENT_OPTIONS
from tandem.rpc.health import Health
from tandem.rpc.server import RunningServer
from tandem.speculation.feedback import FeedbackWanted
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tests.support.wire.fake_carrier import VOCAB_SIZE, Fake

# For tests that do not care which peer serves a sequence.
ANYBODY = CountingOn("", lambda _: None, feedback=FeedbackWanted(probes=4))
# Long enough for models.
PATIENT = Deadlines(30.0, 30.0, 30.0).of(lambda: True)
CHAIN = common_pb2.DRAFT_SHAPE_CHAIN
RULES = {
    "block": target_pb2.VerifierInfo(name="block", lossless=True, takes=CHAIN, resumable=True),
    "greedy_block": target_pb2.VerifierInfo(
        name="greedy_block", lossless=True, takes=CHAIN, needs_pure=True, fixed_gamma=True
    ),
    "token": target_pb2.VerifierInfo(name="token", lossless=True, takes=CHAIN, resumable=True),
}


class FakeDrafter(Fake, drafter_pb2_grpc.DrafterServiceServicer):
    """Drafts the numbers that follow, as certain rows.

    Attributes:
        shape, pure, recipe: the values that it reports.
        openings: the messages that its sequences were opened with.
    """

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.shape: common_pb2.DraftShape.ValueType = CHAIN
        self.pure = True
        self.recipe = '{"method":"fake"}'
        self.openings: list[drafter_pb2.OpenSequence] = []

    message = drafter_pb2.DraftResponse
    answer = drafter_pb2.SequenceResponse

    async def Draft(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        await self.serve(context)

    def round_of(self, request: Any) -> int | None:
        return request.draft.round if request.HasField("draft") else None

    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        opening = request.HasField("open")
        return self._open(request, tokens) if opening else self._draft(request, tokens)

    def _open(
        self, request: drafter_pb2.SequenceRequest, tokens: list[int]
    ) -> drafter_pb2.SequenceResponse:
        tokens += request.open.token_ids
        if request.open.request_id != "trial":
            self.openings.append(request.open)
        opened = drafter_pb2.OpenedSequence(weights_version=self.info.weights_version)
        return drafter_pb2.SequenceResponse(opened=opened)

    def _draft(
        self, request: drafter_pb2.SequenceRequest, tokens: list[int]
    ) -> drafter_pb2.SequenceResponse:
        step = request.draft
        assert step.position == len(tokens)
        tokens += step.new_token_ids
        drafted = [(tokens[-1] + 1 + i) % VOCAB_SIZE for i in range(step.gamma)]
        draft = common_pb2.Draft(token_ids=drafted)
        return drafter_pb2.SequenceResponse(
            drafted=drafter_pb2.DraftedStep(round=step.round, position=len(tokens), draft=draft)
        )

    async def GetModelInfo(
        self, request: drafter_pb2.GetModelInfoRequest, context: Any
    ) -> drafter_pb2.GetModelInfoResponse:
        return drafter_pb2.GetModelInfoResponse(
            info=self.info,
            drafter="fake",
            draft_support=50,
            shape=self.shape,
            pure=self.pure,
            recipe=self.recipe,
        )


class FakeTarget(Fake, target_pb2_grpc.TargetServiceServicer):
    """Counts upwards, but emits 0 after each multiple of `wraps`.

    Attributes:
        verifiers: that it reports.
        tokenizer_json: that it serves; if empty, NOT_FOUND.
        openings: the messages that its sequences were opened with.
        asked: number of calls of GetModelInfo.
        silent: whether these fail.
        max_rounds: rounds that it takes ahead.
        runs: rounds of each run that was asked for.
        drafts: that it makes itself, always right; None where it makes none.
    """

    def __init__(self, wraps: int = 7, **changes: Any) -> None:
        super().__init__(**changes)
        self.wraps = wraps
        self.verifiers = ["block", "greedy_block", "token"]
        self.tokenizer_json = b""
        self.openings: list[target_pb2.OpenSequence] = []
        self.asked = 0
        self.silent = False
        self.max_rounds = 32
        self.runs: list[int] = []
        self.drafts: target_pb2.TargetDrafts | None = None

    def follow(self, token: int) -> int:
        return 0 if token and token % self.wraps == 0 else token + 1

    def text(self, count: int, last: int = 1) -> list[int]:
        """The `count` tokens that follow one."""
        tokens = [last]
        while len(tokens) <= count:
            tokens.append(self.follow(tokens[-1]))
        return tokens[1:]

    message = target_pb2.VerifyResponse
    answer = target_pb2.SequenceResponse

    async def Verify(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        await self.serve(context)

    def steps_of(self, request: Any, opening: Any, last: int, tokens: list[int]) -> Iterator[Any]:
        """A run as the steps that it stands for."""
        if not request.HasField("run"):
            yield request
            return
        run, end = request.run, len(opening.open.token_ids) + opening.open.max_new_tokens
        assert run.round == 0 or run.position == len(tokens)
        self.runs.append(run.rounds)
        first = run.round or last + 1
        for round_ in range(first, first + run.rounds):
            if len(tokens) >= end or tokens[-1] in opening.open.end_token_ids:
                return
            # What it drafted itself is marked by `distinct_siblings`.
            gamma = min(run.gamma, end - len(tokens) - 1)
            own = common_pb2.Draft(
                token_ids=self.text(gamma, tokens[-1]), distinct_siblings=run.gamma > 0
            )
            step = target_pb2.VerifyStep(round=round_, position=len(tokens), draft=own)
            yield target_pb2.SequenceRequest(verify=step)

    def round_of(self, request: Any) -> int | None:
        return request.verify.round if request.HasField("verify") else None

    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        opening = request.HasField("open")
        return self._open(request, tokens) if opening else self._verify(request, tokens)

    def _open(
        self, request: target_pb2.SequenceRequest, tokens: list[int]
    ) -> target_pb2.SequenceResponse:
        tokens += request.open.token_ids
        if request.open.request_id != "trial":
            self.openings.append(request.open)
        if request.open.carry.levels or request.open.resumes:
            return target_pb2.SequenceResponse(opened=target_pb2.OpenedSequence())
        tokens.append(self.follow(tokens[-1]))
        return target_pb2.SequenceResponse(opened=target_pb2.OpenedSequence(token_id=tokens[-1]))

    def _verify(
        self, request: target_pb2.SequenceRequest, tokens: list[int]
    ) -> target_pb2.SequenceResponse:
        step = request.verify
        assert step.position == len(tokens)
        accepted = 0
        for token in step.draft.token_ids:
            if token != self.follow(tokens[-1]):
                break
            tokens.append(token)
            accepted += 1
        tokens.append(self.follow(tokens[-1]))
        own = step.draft.distinct_siblings and len(step.draft.token_ids) > 0
        return target_pb2.SequenceResponse(
            verdict=target_pb2.Verdict(
                round=step.round,
                position=len(tokens),
                num_accepted=accepted,
                place=accepted,
                next_token_id=tokens[-1],
                overlaps=[1.0] * len(step.draft.token_ids),
                drafted=common_pb2.Draft(token_ids=step.draft.token_ids) if own else None,
            )
        )

    async def GetModelInfo(
        self, request: target_pb2.GetModelInfoRequest, context: Any
    ) -> target_pb2.GetModelInfoResponse:
        self.asked += 1
        if self.silent:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "silent")
        return target_pb2.GetModelInfoResponse(
            info=self.info,
            verifiers=[RULES[name] for name in self.verifiers],
            max_rounds=self.max_rounds,
            drafts=self.drafts,
        )

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Any
    ) -> target_pb2.GetTokenizerResponse:
        if not self.tokenizer_json:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no tokenizer")
        return target_pb2.GetTokenizerResponse(tokenizer_json=self.tokenizer_json)


async def add_fake(fake: FakeDrafter | FakeTarget, server: grpc.aio.Server) -> None:
    """Add a fake to a server, with the status SERVING."""
    fake.health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    for name in ("drafter.v1.DrafterService", "target.v1.TargetService"):
        await fake.health.set(f"tandem.{name}", health_pb2.HealthCheckResponse.SERVING)
    if isinstance(fake, FakeDrafter):
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(fake, server)
    else:
        target_pb2_grpc.add_TargetServiceServicer_to_server(fake, server)


async def _serve(
    stack: AsyncExitStack,
    fake: FakeDrafter | FakeTarget,
    credentials: Callable[[], grpc.ServerCredentials] | None,
) -> str:
    """The address of a fake on a free port, until the stack ends."""
    server = grpc.aio.server()
    await add_fake(fake, server)
    here = "127.0.0.1:0"
    port = (
        server.add_secure_port(here, credentials())
        if credentials is not None
        else server.add_insecure_port(here)
    )
    address = f"127.0.0.1:{port}"
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return address


@asynccontextmanager
async def serve_fakes(
    *fakes: FakeDrafter | FakeTarget,
    credentials: Callable[[], grpc.ServerCredentials] | None = None,
    **settings: Any,
) -> AsyncIterator[OrchestratorSettings]:
    """Fakes on free ports, and the settings of an orchestrator over them."""
    async with AsyncExitStack() as stack:
        addresses = [(fake, await _serve(stack, fake, credentials)) for fake in fakes]
        peers: dict[str, Any] = {
            "gamma": 4,  # so that a seed repeats its text
            "failover_seconds": 0.0,  # failures show at once
            "drafters": tuple(at for fake, at in addresses if isinstance(fake, FakeDrafter)),
            "targets": tuple(at for fake, at in addresses if isinstance(fake, FakeTarget)),
        }
        yield OrchestratorSettings(**(peers | settings))


@asynccontextmanager
async def orchestrate(
    *fakes: FakeDrafter | FakeTarget,
    ready: bool = True,
    channel_options: Any = (),
    **settings: Any,
) -> AsyncIterator[Any]:
    """A stub of an orchestrator over fakes."""
    async with serve_fakes(*fakes, **settings) as chosen:
        server = RunningServer("127.0.0.1:0", make_service(chosen))
        await server.start()
        try:
            if ready:
                await server.ready()
            address = f"127.0.0.1:{server.port}"
            options = (*CLIENT_OPTIONS, *channel_options)
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        finally:
            await server.stop(1.0)


def generation(**changes: Any) -> pb.Generation:
    fields: dict[str, Any] = {
        "prompt_token_ids": [1],
        "stopping": pb.Stopping(max_new_tokens=20),
        "speculation": pb.Speculation(gamma=4),
    }
    return pb.Generation(**(fields | changes))


def request(**changes: Any) -> pb.CompleteRequest:
    return pb.CompleteRequest(generation=generation(**changes))
