"""Drafts that are prepared while a target verifies, through real sockets."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_svc.loading import load
from drafter_svc.preparing import Preparing
from drafter_svc.sequence import DraftedSequence
from drafter_svc.servicer import DrafterServicer, service_of
from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import StartupError, Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.streams.link import SharedStream
from target_svc.sequence import VerifiedSequence
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.exactness import CELLS, LENGTH, PROMPT, target_law
from tests.service.conftest import address_of, connect, start
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.processes.refusals import refusal
from tests.support.processes.services import generation as law_generation
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fakes import FakeDrafter, FakeTarget, generation, orchestrate, request
from tests.support.wire.scrape import ANY_PORT, Scraped, families
from tests.support.wire.talk import Talk

TOKENS = 30
LAW_TEXTS = 100
OPENING = drafter_pb2.OpenSequence(
    token_ids=[1, 2],
    request_id="r",
    sampling=common_pb2.Sampling(seed=1),
    target_vocab_size=VOCAB_SIZE,
    max_new_tokens=60,
)
CAME = "tandem_drafts_ahead_total"
Prepared = drafter_pb2.DraftedStep.Prepared
DraftedStep = drafter_pb2.DraftedStep


class Patience:
    """Verdicts that wait until all is prepared after the draft that they are about, and received
    where it is sent.

    Attributes:
        taken: drafts that were there before they were asked for.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self._sent = self._received = 0
        # By text and round.
        self._begun: defaultdict[Any, asyncio.Future[asyncio.Future[None] | None]]
        self._begun = defaultdict(lambda: asyncio.get_running_loop().create_future())
        step, begin, send = DraftedSequence._step, Preparing.begin, Preparing._send
        verify, hand_on = VerifiedSequence._step, SharedStream._hand_on

        async def draft(sequence: Any, message: Any, traced: Any) -> Any:
            self.taken += message.draft.taken
            return await step(sequence, message, traced)

        def behind(preparing: Any, request: Any, draft: Any) -> None:
            begin(preparing, request, draft)
            begun = self._begun[preparing._request_id, request.round]
            if not begun.done():  # all probes of a drafter have one name
                begun.set_result(preparing._job)

        def sends(preparing: Any, *job: Any) -> None:
            self._sent += preparing._asked is not None
            send(preparing, *job)

        def receives(stream: Any, response: Any) -> None:
            hand_on(stream, response)
            self._received += response.WhichOneof("result") == "prepared"

        async def decide(sequence: Any, message: Any, traced: Any) -> Any:
            if message.verify.draft.token_ids:
                await self.prepared(sequence.request_id, message.verify.round)
            await until(lambda: self._received >= self._sent)
            return await verify(sequence, message, traced)

        patch.setattr(DraftedSequence, "_step", draft)
        patch.setattr(Preparing, "begin", behind)
        patch.setattr(Preparing, "_send", sends)
        patch.setattr(SharedStream, "_hand_on", receives)
        patch.setattr(VerifiedSequence, "_step", decide)

    def nothing_more(self, text: str, round_: int) -> None:
        """Nothing will be prepared after the draft of a round."""
        self._begun[text, round_].set_result(None)

    async def prepared(self, text: str, round_: int) -> None:
        """All that is to be, after the draft of a round."""
        if (preparing := await self._begun[text, round_]) is not None:
            with suppress(asyncio.CancelledError):
                await preparing


class Served:
    """An orchestrator of a drafter that prepares, with its metrics."""

    def __init__(self, stub: Any, drafter: DrafterServicer, metrics: int) -> None:
        self.stub, self.drafter, self._metrics = stub, drafter, metrics
        trees = drafter.loaded.info.max_nodes > 0
        self._size = {"gamma": 4} | ({"max_nodes": 8} if trees else {})

    async def text(self, **changes: Any) -> list[int]:
        message = generation(
            stopping={"max_new_tokens": TOKENS, "ignore_eos": True},
            speculation=self._size,
            **{"sampling": {"seed": 3, "temperature": 0.0}, **changes},
        )
        reply = await self.stub.Complete(pb.CompleteRequest(generation=message))
        return list(reply.token_ids)

    async def came(self, outcome: str) -> float:
        return Scraped(await families(self._metrics)).value(CAME, outcome=outcome)


@pytest.fixture
async def served(
    request: pytest.FixtureRequest, random_pair: tuple[Path, Path]
) -> AsyncIterator[Served]:
    """Of the orchestrator's setting AHEAD, "held" if it has no parameter; perhaps with a method."""
    way, method = getattr(request, "param", ("held", "model"))
    small, large = map(str, random_pair)
    async with AsyncExitStack() as stack:
        servicer = DrafterServicer(DrafterSettings(model=small, method=method, ahead=256))
        drafter = await start(stack, service_of(servicer))
        target = await start(stack, make_target(TargetSettings(model=large)))
        service = make_orchestrator(
            OrchestratorSettings(
                drafters=(address_of(drafter),),
                targets=(address_of(target),),
                ahead=way,
                metrics_listen=ANY_PORT,
                stage_floor_seconds=60.0,
                draft_seconds=60.0,
                queue_seconds=HANG_SECONDS,  # texts have a seed and a size: they wait
            )
        )
        front = await start(stack, service)
        await front.ready()
        channel = await connect(stack, address_of(front))
        assert service.metering is not None
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        yield Served(stub, servicer, service.metering.port)


@pytest.mark.parametrize(
    ("served", "sends"),
    [(("held", "model"), False), (("sent", "model"), True), (("sent", "chains"), True)],
    indirect=["served"],
)
async def test_what_was_ready_is_used_and_counted(
    served: Served, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = await served.text()
    with monkeypatch.context() as patch:
        patience = Patience(patch)
        hits, late = await served.came("hit"), await served.came("late")
        assert await served.text() == hurried
        assert await served.came("hit") > hits + 3
        assert await served.came("late") == late
        assert (patience.taken > 3) == sends
        # Sixteen at once, of which some are cancelled in the middle of it.
        sampled = {"seed": 7, "temperature": 1.0}
        alone = await served.text(sampling=sampled)
        texts = [asyncio.create_task(served.text(sampling=sampled)) for _ in range(16)]
        await asyncio.sleep(0)
        for text in texts[::4]:
            text.cancel()
        found = await asyncio.gather(*texts, return_exceptions=True)
        assert [ids for ids in found if isinstance(ids, list)] == [alone] * 12
    admission = served.drafter.loaded.engine.admission
    free = served.drafter.loaded.models[0]
    await until(lambda: admission.open_sequences == 0)
    await until(lambda: free.free_positions == free.positions)


@pytest.mark.parametrize("served", [("sent", "model")], indirect=True)
async def test_the_law_is_the_targets(
    served: Served, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = Patience(monkeypatch)
    hits = await served.came("hit")
    counts = np.zeros(CELLS, dtype=np.int64)
    weights = VOCAB_SIZE ** np.arange(LENGTH - 1, -1, -1)
    seeds = iter(range(LAW_TEXTS))

    async def work() -> None:
        for seed in seeds:
            asked = law_generation(PROMPT, max_new_tokens=2 * LENGTH, seed=seed, gamma=3)
            reply = await served.stub.Complete(pb.CompleteRequest(generation=asked))
            counts[int(np.dot(weights, reply.token_ids[:LENGTH]))] += 1

    await asyncio.gather(*(work() for _ in range(8)))
    assert await served.came("hit") > hits + LAW_TEXTS / 2
    assert patience.taken > LAW_TEXTS / 4
    assert chi_square_p_value(counts, target_law(random_pair[1])) > 0.001


@pytest.mark.parametrize("served", [("held", "model"), ("sent", "model")], indirect=True)
async def test_a_drafter_that_dies_over_what_it_prepared_changes_no_greedy_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await served.text()
    patience = Patience(monkeypatch)
    step, dead = DraftedSequence._step, set[str]()

    async def mortal(sequence: Any, message: Any, traced: Any) -> Any:
        reply = await step(sequence, message, traced)
        if message.draft.round >= 4 and sequence.request_id not in dead:
            dead.add(sequence.request_id)
            patience.nothing_more(sequence.request_id, message.draft.round)
            raise Unavailable("killed")
        return reply

    monkeypatch.setattr(DraftedSequence, "_step", mortal)
    assert [await served.text() for _ in range(3)] == [expected] * 3
    assert len(dead) >= 1


async def test_a_text_with_penalties_is_drafted_as_ever(served: Served) -> None:
    shaped = {"seed": 1, "temperature": 0.0, "shaping": {"presence_penalty": 0.5}}
    assert len(await served.text(sampling=shaped)) == TOKENS


async def test_a_round_that_was_skipped_misses(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of another size; the drafts are those of a drafter that prepares nothing."""
    answers: dict[int, list[Any]] = {}
    patience = Patience(monkeypatch)
    for nodes in (0, 32):
        async with AsyncExitStack() as stack:
            servicer = DrafterServicer(DrafterSettings(model=str(random_pair[0]), ahead=nodes))
            server = await start(stack, service_of(servicer))
            await server.ready()
            channel = await connect(stack, address_of(server))
            stub: Any = drafter_pb2_grpc.DrafterServiceStub(channel)
            info = await stub.GetModelInfo(drafter_pb2.GetModelInfoRequest())
            assert info.ahead == nodes
            talk = Talk(stub.Draft())
            await talk.ask(drafter_pb2.SequenceRequest(open=OPENING))
            position, news = 2, [3]
            for round_, gamma in ((1, 3), (2, 3), (4, 3), (5, 2), (6, 2)):
                step = drafter_pb2.DraftStep(
                    round=round_, position=position, new_token_ids=news, gamma=gamma, ahead=True
                )
                reply = await talk.ask(drafter_pb2.SequenceRequest(draft=step))
                answers.setdefault(nodes, []).append(reply.drafted)
                position, news = position + len(news), [*reply.drafted.draft.token_ids[:1], 0]
                if nodes:
                    await patience.prepared("r", round_)
            talk.cancel()
    plain, prepared = answers[0], answers[32]
    assert [one.draft for one in plain] == [one.draft for one in prepared]
    assert not any(one.HasField("prepared") for one in plain)
    first, second, skipped, shorter, last = (one.prepared.outcome for one in prepared)
    assert first == 0
    assert (skipped, shorter) == (DraftedStep.OUTCOME_MISS, DraftedStep.OUTCOME_MISS)
    assert {second, last} <= {DraftedStep.OUTCOME_HIT, DraftedStep.OUTCOME_MISS}


@pytest.mark.parametrize(
    ("nodes", "steps", "code", "sentence"),
    [
        (0, [{"ahead": True, "send_ahead": True}], "INVALID_ARGUMENT", "draft.send_ahead needs"),
        (8, [{"send_ahead": True}], "INVALID_ARGUMENT", "draft.send_ahead needs draft.ahead"),
        (8, [{"taken": True}], "FAILED_PRECONDITION", "draft.taken: no draft was sent"),
        (
            8,
            [{"ahead": True}, {"taken": True, "new_token_ids": [4, 4, 4, 4]}],
            "FAILED_PRECONDITION",
            "draft.taken: no draft was sent",
        ),
    ],
)
async def test_a_step_that_cannot_be_ends_its_sequence(
    nodes: int,
    steps: list[dict[str, Any]],
    code: str,
    sentence: str,
    random_pair: tuple[Path, Path],
) -> None:
    async with AsyncExitStack() as stack:
        servicer = DrafterServicer(DrafterSettings(model=str(random_pair[0]), ahead=nodes))
        server = await start(stack, service_of(servicer))
        await server.ready()
        stub: Any = drafter_pb2_grpc.DrafterServiceStub(await connect(stack, address_of(server)))
        talk = Talk(stub.Draft())
        await talk.ask(drafter_pb2.SequenceRequest(open=OPENING))
        position = 2
        for round_, fields in enumerate(steps, 1):
            step = {"new_token_ids": [3], "gamma": 2, **fields}
            asked = drafter_pb2.DraftStep(round=round_, position=position, **step)
            await talk.ask(drafter_pb2.SequenceRequest(draft=asked))
            position += len(asked.new_token_ids)
        ended, said = await talk.end()
        assert ended.name == code
        assert sentence in said
        await until(lambda: servicer.loaded.engine.admission.open_sequences == 0)


async def test_drafts_are_sent_behind_the_answer_as_far_as_they_fit(
    random_pair: tuple[Path, Path],
) -> None:
    counts = []
    for kib in (1, 64):
        async with AsyncExitStack() as stack:
            settings = DrafterSettings(model=str(random_pair[0]), ahead=1024, ahead_kib=kib)
            server = await start(stack, make_drafter(settings))
            await server.ready()
            channel = await connect(stack, address_of(server))
            talk = Talk(drafter_pb2_grpc.DrafterServiceStub(channel).Draft())
            await talk.ask(drafter_pb2.SequenceRequest(open=OPENING))
            step = drafter_pb2.DraftStep(
                round=1, position=2, new_token_ids=[3], gamma=4, ahead=True, send_ahead=True
            )
            drafted = await talk.ask(drafter_pb2.SequenceRequest(draft=step))
            assert drafted.WhichOneof("result") == "drafted"
            prepared = (await talk.read()).prepared
            assert prepared.round == 1
            assert prepared.ByteSize() <= kib * 1024
            counts.append(len(prepared.drafts))
            # The next step is answered by what was sent, and by nothing else.
            first = prepared.drafts[0]
            taken = drafter_pb2.DraftStep(
                round=2, position=3, new_token_ids=first.new_token_ids, gamma=4, taken=True
            )
            after = drafter_pb2.DraftStep(
                round=3, position=3 + len(first.new_token_ids), new_token_ids=[1], gamma=4
            )
            await talk.write(drafter_pb2.SequenceRequest(draft=taken))
            answer = await talk.ask(drafter_pb2.SequenceRequest(draft=after))
            assert answer.drafted.round == 3
            talk.cancel()
    assert 0 < counts[0] < counts[1]


async def test_an_answer_that_is_written_late_prepares_nothing(
    random_pair: tuple[Path, Path],
) -> None:
    """A caller may send the next step before it reads the answer to the one before."""
    async with AsyncExitStack() as stack:
        servicer = DrafterServicer(DrafterSettings(model=str(random_pair[0]), ahead=64))
        server = await start(stack, service_of(servicer))
        await server.ready()
        loaded = servicer.loaded
        shared = loaded.engine, loaded.drafter, loaded.info, loaded.grammars
        sequence = DraftedSequence(*shared, loaded.ahead._replace(bytes=1 << 20))
        said: list[Any] = []
        sequence.say = said.append
        await sequence.handle(drafter_pb2.SequenceRequest(open=OPENING))
        wanted: dict[str, Any] = {"ahead": True, "send_ahead": True}
        first, second = (
            drafter_pb2.DraftStep(
                round=round_, position=round_ + 1, new_token_ids=[3], gamma=4, **ahead
            )
            for round_, ahead in ((1, wanted), (2, {}))
        )
        answer = await sequence.handle(drafter_pb2.SequenceRequest(draft=first))
        assert answer is not None
        assert answer.behind is not None
        going_on = asyncio.create_task(sequence.handle(drafter_pb2.SequenceRequest(draft=second)))
        await asyncio.sleep(0)
        answer.behind()
        assert sequence._preparing is not None
        assert sequence._preparing._job is None
        await going_on
        (prepared,) = said
        assert (prepared.prepared.round, len(prepared.prepared.drafts)) == (1, 0)
        sequence.release()


def test_more_ahead_than_a_sequence_has_room_for_is_refused(random_pair: tuple[Path, Path]) -> None:
    small = DrafterSettings(
        model=str(random_pair[0]), max_length=64, cache_tokens=128, engine="torch", ahead=64
    )
    with pytest.raises(StartupError, match="AHEAD=64: a sequence of 64 tokens takes 209 positions"):
        load(small)
    # Without a length it is what leaves room for them, and a token and one after it at least.
    with pytest.raises(StartupError, match="AHEAD=64: a sequence of 2 tokens takes 147 positions"):
        load(small.model_copy(update={"max_length": 0}))
    fits = load(small.model_copy(update={"max_length": 0, "cache_tokens": 200}))
    assert (fits.info.max_length, fits.ahead.nodes) == (55, 64)
    environment = {"TANDEM_DRAFTER_AHEAD": "5000", "TANDEM_DRAFTER_MODEL": str(random_pair[0])}
    assert "TANDEM_DRAFTER_AHEAD" in refusal("drafter_svc", environment)


class Claims(FakeDrafter):
    """Says of its drafts what it is told to.

    Attributes:
        claim: of each draft.
        asked: whether each step asked for more to be prepared.
    """

    def __init__(self, claim: Prepared | None, ahead: int) -> None:
        super().__init__()
        self.claim, self._ahead = claim, ahead
        self.asked: list[bool] = []

    def _draft(self, request: Any, tokens: list[int]) -> drafter_pb2.SequenceResponse:
        self.asked.append(request.draft.ahead)
        answer = super()._draft(request, tokens)
        if self.claim is not None:
            answer.drafted.prepared.CopyFrom(self.claim)
        return answer

    async def GetModelInfo(self, request: Any, context: Any) -> drafter_pb2.GetModelInfoResponse:
        reply = await super().GetModelInfo(request, context)
        reply.ahead = self._ahead
        return reply


@pytest.mark.parametrize("outcome", [0, 9])
async def test_an_outcome_that_is_none_loses_the_drafter_and_not_the_text(outcome: int) -> None:
    claim = Prepared(ready_ns=1)
    claim.outcome = outcome  # type: ignore[assignment]
    drafter, target = Claims(claim, 8), FakeTarget()
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == target.text(20)
        assert reply.summary.drafter_lost


@pytest.mark.parametrize("ahead", [0, 8])
async def test_only_a_drafter_that_prepares_is_asked_to(ahead: int) -> None:
    drafter, target = Claims(None, ahead), FakeTarget()
    async with orchestrate(drafter, target, ahead="held") as stub:
        await stub.Complete(request())
    assert drafter.asked
    assert set(drafter.asked) == {ahead > 0}
