"""Hidden states on their way to a drafter: from the target's passes, by way of the orchestrator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from drafter_svc import servicer as drafter_servicer
from drafter_svc.loading import LoadedDrafter, load
from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2_grpc
from tandem.drafting.drafter import Drafter, DraftSequence, Traits
from tandem.engine.asks import Steps
from tandem.errors import Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Feedback, FeedbackWanted, HiddenDtype
from target_svc.sequence import VerifiedSequence
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import Stack, address_of, connect, start
from tests.support.processes.services import generation
from tests.support.waiting import until
from tests.support.wire.steps import INVALID, draft_step, open_draft, status_of
from tests.support.wire.talk import Talk

PROMPT = [1, 2, 0, 3]
WIDTH = 16
# What the first layer reads, and what the head reads, of a target of one layer.
SPEC = FeedbackWanted((2, 0), WIDTH, HiddenDtype.FLOAT32, prompt_tokens=3)


class Listener(Drafter):
    """Drafts the same tokens whatever comes, and keeps what came.

    Attributes:
        heard: of each draft, the text so far and the states that are known of its end.
    """

    def __init__(self, spec: FeedbackWanted = SPEC) -> None:
        self.traits = Traits(feedback=spec)
        self.heard: list[tuple[list[int], Feedback | None]] = []

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        yield from ()
        known = sequence.feedback
        parts, feature = known.take(), None
        if parts:
            assert parts[-1].positions[-1] + 1 == known.end
            positions = range(parts[0].positions[0], known.end)
            feature = Feedback(0, positions, np.concatenate([part.states for part in parts]))
        self.heard.append((list(sequence.token_ids), feature))
        return Draft.certain([4, 2, 0][:gamma])

    def check(self, text: list[int], target: Path) -> int:
        """That it heard of each position once, from the prompt's last three on: of all but the last
        token at each draft. Returns the position after the last one."""
        states, position = expected(target, text), len(PROMPT) - SPEC.prompt_tokens
        for before, feature in self.heard:
            assert before == text[: len(before)]
            assert feature is not None
            assert feature.positions == range(position, len(before) - 1)
            end = len(before) - 1
            assert np.allclose(feature.states, states[position:end], atol=1e-4)
            position = end
        assert self.heard
        return position


def listen(patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    """Have drafter services serve a drafter of a test's own."""

    def loaded(settings: DrafterSettings) -> LoadedDrafter:
        own = load(DrafterSettings(method="lookup"))
        info = own.info
        info.hidden_size = drafter.traits.feedback.hidden_size
        return LoadedDrafter(own.engine, info, (), drafter, "listener", "{}")

    patch.setattr(drafter_servicer, "load", loaded)


@asynccontextmanager
async def served(
    random_pair: tuple[Path, Path], feedback: str, ready: bool = True, targets: int = 1
) -> AsyncIterator[Any]:
    """An orchestrator's stub, over a drafter and targets."""
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(method="lookup")))
        chosen = TargetSettings(model=str(random_pair[1]), feedback=feedback, engine="torch")
        addresses = [address_of(await start(stack, make_target(chosen))) for _ in range(targets)]
        settings = OrchestratorSettings(drafters=(address_of(drafter),), targets=tuple(addresses))
        front = await start(stack, make_orchestrator(settings))
        if ready:
            await front.ready()
        channel = await connect(stack, address_of(front))
        yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


@torch.inference_mode()
def expected(folder: Path, text: Sequence[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = model(torch.tensor([list(text)]), output_hidden_states=True, use_cache=False)
    return torch.stack([found.hidden_states[1][0], found.hidden_states[0][0]], 1).numpy()


def asked_for(seed: int, gamma: int = 3) -> pb.CompleteRequest:
    return pb.CompleteRequest(
        generation=generation(
            PROMPT, seed=seed, gamma=gamma, temperature=9.0, max_new_tokens=24, verifier="token"
        )
    )


async def test_a_drafter_hears_of_each_position_once(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    listen(monkeypatch, listener)
    async with served(random_pair, "0,1,last") as stub:
        for seed in range(4):
            listener.heard.clear()
            reply = await stub.Complete(asked_for(seed))
            text = [*PROMPT, *reply.token_ids]
            position = listener.check(text, random_pair[1])
            # After the last draft too, though nobody is told of it any more.
            least = (position - 1) * SPEC.state_bytes
            assert least < reply.summary.feedback_bytes <= len(text) * SPEC.state_bytes


async def test_another_target_goes_on_where_the_lost_one_was(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells the end of its prompt, which is known but for the last token: there is no gap."""
    listener = Listener()
    listen(monkeypatch, listener)
    answer = VerifiedSequence._step
    lost: list[Any] = []

    async def mortal(self: VerifiedSequence, message: Any, traced: Any) -> Any:
        reply = await answer(self, message, traced)
        if message.verify.round == 4 and not lost:
            lost.append(message)
            raise Unavailable("killed")
        return reply

    monkeypatch.setattr(VerifiedSequence, "_step", mortal)
    async with served(random_pair, "0,1,last", targets=2) as stub:
        reply = await stub.Complete(asked_for(1))
    assert lost
    text = [*PROMPT, *reply.token_ids]
    listener.check(text, random_pair[1])


async def test_plain_rounds_bring_none_and_leave_a_gap(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    listen(monkeypatch, listener)
    async with served(random_pair, "0,1,last") as stub:
        plain = (await stub.Complete(asked_for(1, gamma=0))).summary
        # Those of the prompt: a draft may be chosen later.
        assert plain.feedback_bytes == 3 * SPEC.state_bytes
    assert not listener.heard


async def test_nothing_is_sent_where_nothing_is_wanted(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target could give states; this drafter asks for none."""
    listener = Listener(FeedbackWanted())
    listen(monkeypatch, listener)
    async with served(random_pair, "0,1,last") as stub:
        assert (await stub.Complete(asked_for(1))).summary.feedback_bytes == 0
    assert [feature for _, feature in listener.heard] == [None] * len(listener.heard)


@pytest.mark.parametrize(
    ("feedback", "wants", "made_for", "sentence"),
    [
        ("none", SPEC, "", "reads hidden states of layer 0, and the target (target) gives none:"),
        ("0", SPEC, "", "reads hidden states of layer 2, and the target (target) gives 0: set the"),
        ("0,last", FeedbackWanted((0,), 48), "", "reads hidden states of 48 numbers, and the"),
        ("0,last", SPEC, "f" * 64, "made for a target with the weights ffffffffffff, and the"),
    ],
)
async def test_a_head_that_does_not_suit_the_target_is_not_used(
    random_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    feedback: str,
    wants: FeedbackWanted,
    made_for: str,
    sentence: str,
) -> None:
    listener = Listener(replace(wants, made_for=made_for))
    listen(monkeypatch, listener)
    with capture_logs() as logs:
        async with served(random_pair, feedback, ready=False):
            await until(lambda: any(line["event"] == "replica not used" for line in logs))
    (misfit,) = {line["reason"] for line in logs if line["event"] == "replica not used"}
    assert sentence in misfit


def feedback(**changes: Any) -> common_pb2.Feedback:
    fields: dict[str, Any] = {"round": 0, "first": 0, "positions": 2, "hidden": bytes(256)}
    return common_pb2.Feedback(**(fields | changes))


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ([feedback(hidden=bytes(255))], "draft.feedback[0].hidden has 255 bytes, 2 positions have"),
        ([feedback(positions=3)], "draft.feedback[0].hidden has 256 bytes, 3 positions have 384"),
        ([feedback(positions=0)], "draft.feedback[0] has 0 positions from 0 on"),
        ([feedback(first=2)], "draft.feedback[0] has 2 positions from 2 on, the text 4 tokens"),
        ([feedback(round=1)], "draft.feedback[0].round is 1"),
        ([feedback(), feedback()], "draft.feedback[1].round is 0: rounds must ascend"),
    ],
)
async def test_a_drafter_refuses_other_states(
    monkeypatch: pytest.MonkeyPatch, told: list[common_pb2.Feedback], sentence: str
) -> None:
    listen(monkeypatch, Listener())
    async with AsyncExitStack() as stack:
        server = await start(stack, make_drafter(DrafterSettings(method="lookup")))
        await server.ready()
        stub: Any = drafter_pb2_grpc.DrafterServiceStub(await connect(stack, address_of(server)))
        sound = Talk(stub.Draft())
        await sound.ask(open_draft())
        assert (await sound.ask(draft_step(feedback=[feedback()]))).drafted.draft.token_ids
        sound.cancel()
        code, details = await status_of(Talk(stub.Draft()), open_draft(), draft_step(feedback=told))
        assert (code, sentence in details) == (INVALID, True), details


async def test_a_drafter_that_asks_for_none_takes_none(stack: Stack) -> None:
    code, details = await status_of(
        Talk(stack.drafter.Draft()), open_draft(), draft_step(feedback=[feedback()])
    )
    assert (code, details) == (INVALID, "draft.feedback must be empty: this drafter asks for none")
