"""Predictions and probes on the wire: what is told, what is taken, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import StartupError, Unavailable
from tandem.inference.loading.extra_embeddings import MadeFor, write_extra_embeddings
from tandem.peers.replicas.compatibility import capabilities_of, require_feedback
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.models.probes import extra_rows
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.wire.steps import (
    INVALID,
    draft_step,
    open_draft,
    open_verify,
    status_of,
    verify_step,
)
from tests.support.wire.talk import Talk

EVERYWHERE, KEPT = common_pb2.PREDICTED_AT_ALL, common_pb2.PREDICTED_AT_KEPT
EXTRA = 2


def spec(top: int, at: Any = EVERYWHERE) -> common_pb2.FeedbackSpec:
    return common_pb2.FeedbackSpec(top=top, predicted_at=at)


def probed(*probes: tuple[int, int]) -> common_pb2.Draft:
    """Two certain tokens in a chain, with probes: each its id and its place."""
    return common_pb2.Draft(
        token_ids=[0, 1],
        probes=common_pb2.Probes(
            token_ids=[token_id for token_id, _ in probes], parents=[at for _, at in probes]
        ),
    )


@pytest.fixture
async def target(random_pair: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Any]:
    model = random_pair[1]
    settings = TargetSettings(
        model=str(model), engine="torch", extra_embeddings=extra_rows(tmp_path, model, EXTRA)
    )
    async with AsyncExitStack() as stack:
        server = await start(stack, make_target(settings))
        await server.ready()
        yield target_pb2_grpc.TargetServiceStub(await connect(stack, address_of(server)))


async def test_a_target_tells_what_it_predicts(target: Any, random_pair: Any) -> None:
    info = await target.GetModelInfo(target_pb2.GetModelInfoRequest())
    assert info.probe_tokens == EXTRA
    call = Talk(target.Verify())
    opened = (await call.ask(open_verify(feedback=spec(2), max_nodes=8))).opened
    assert not opened.HasField("feedback")
    draft = probed((4, 0), (VOCAB_SIZE, 2), (3, 3))
    verdict = (await call.ask(verify_step(draft=draft, feedback=True))).verdict
    told = verdict.feedback
    assert (told.round, list(told.places)) == (1, [0, 1, 2, 3, 4, 5])
    assert (told.positions, told.hidden, list(told.predicted_ids)) == (0, b"", [])
    assert list(told.predictions.sizes) == [2] * 6
    ids = np.frombuffer(told.predictions.ids, "<u4").reshape(6, 2)
    text = [1, 2, 3, opened.token_id]
    model = AutoModelForCausalLM.from_pretrained(random_pair[1]).eval()
    for place, way in ((0, []), (1, [0]), (2, [0, 1]), (3, [4]), (5, [4, 3])):
        with torch.inference_mode():
            row = model(torch.tensor([[*text, *way]])).logits[0, -1].softmax(-1)
        assert ids[place].tolist() == row.topk(2).indices.tolist()
        assert told.masses[place] / 65535 == pytest.approx(
            float(row.topk(2).values.sum()), abs=1e-4
        )
    # What the next round is told is of its own draft.
    later = verify_step(round=2, position=verdict.position, feedback=True)
    assert list((await call.ask(later)).verdict.feedback.places) == [0, 1, 2]
    call.cancel()


async def test_ids_alone_come_with_a_top_of_one(target: Any) -> None:
    call = Talk(target.Verify())
    await call.ask(open_verify(feedback=spec(1, KEPT), max_nodes=8))
    verdict = (await call.ask(verify_step(draft=probed((4, 0), (4, 3)), feedback=True))).verdict
    told = verdict.feedback
    behind = [3, 4] if verdict.place == 0 else []
    assert list(told.places) == [*range(verdict.place + 1), *behind]
    assert len(told.predicted_ids) == len(told.places)
    assert not told.HasField("predictions")
    assert not told.masses
    call.cancel()


async def test_a_text_without_probes_has_not_a_byte_more(target: Any) -> None:
    """The same verdict by the same bytes, but for its times."""
    found = []
    for changes in ({}, {"max_nodes": 8}):
        call = Talk(target.Verify())
        await call.ask(open_verify(**changes))
        verdict = (await call.ask(verify_step())).verdict
        verdict.ClearField("times")
        found.append(verdict.SerializeToString())
        call.cancel()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("nodes", "draft", "sentence"),
    [
        (8, probed((VOCAB_SIZE + EXTRA, 0)), "draft.probes.token_ids holds id"),
        (8, probed((1, 4)), "draft.probes.parents[0] = 4 does not come before its probe"),
        (3, probed((1, 0), (1, 0)), "open.max_nodes leaves room for 1 beside 2 tokens"),
        (0, probed((1, 0)), "open.max_nodes leaves room for 0 beside 2 tokens"),
        (8, common_pb2.Draft(token_ids=[VOCAB_SIZE]), "draft.token_ids holds id"),
    ],
)
async def test_probes_that_cannot_be_computed_are_refused(
    target: Any, nodes: int, draft: common_pb2.Draft, sentence: str
) -> None:
    talk = Talk(target.Verify())
    code, details = await status_of(talk, open_verify(max_nodes=nodes), verify_step(draft=draft))
    assert (code, sentence in details) == (INVALID, True), details


@pytest.fixture
async def drafter(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A drafter of a method."""
    async with AsyncExitStack() as stack:
        server = await start(stack, make_drafter(DrafterSettings(method=request.param)))
        await server.ready()
        yield drafter_pb2_grpc.DrafterServiceStub(await connect(stack, address_of(server)))


@pytest.mark.parametrize(
    ("drafter", "top", "at", "probes", "extra"),
    [
        ("jacobi", 1, EVERYWHERE, 0, 0),
        ("lookahead", 1, EVERYWHERE, 28, 0),
        ("masks", 64, KEPT, 20, 4),
        ("lookup", 0, 0, 0, 0),
    ],
    indirect=["drafter"],
)
async def test_the_handshake_says_what_is_wanted(
    drafter: Any, top: int, at: Any, probes: int, extra: int
) -> None:
    info = await drafter.GetModelInfo(drafter_pb2.GetModelInfoRequest())
    assert (info.feedback.top, info.feedback.predicted_at) == (top, at)
    assert (info.probes, info.probe_tokens) == (probes, extra)
    assert not info.feedback.layers


def rows(*sizes: int, ids: bytes | None = None, weights: bytes | None = None) -> Any:
    count = sum(sizes)
    return common_pb2.Rows(
        sizes=sizes,
        ids=np.arange(count, dtype="<u4").tobytes() if ids is None else ids,
        weights=np.ones(count, "<u2").tobytes() if weights is None else weights,
    )


def told(**changes: Any) -> drafter_pb2.SequenceRequest:
    feedback = common_pb2.Feedback(**{"round": 1, **changes})
    return draft_step(round=2, position=4, new_token_ids=[1], feedback=[feedback])


@pytest.mark.parametrize(
    ("drafter", "step", "sentence"),
    [
        ("lookup", told(), "draft.feedback must be empty"),
        ("jacobi", told(round=2), "draft.feedback[0].round is 2"),
        ("jacobi", told(positions=1), "draft.feedback[0].positions must be 0"),
        ("jacobi", told(places=[0, 4], predicted_ids=[1, 2]), "places must ascend, up to 3"),
        ("jacobi", told(places=[1, 0], predicted_ids=[1, 2]), "places must ascend, up to 3"),
        ("jacobi", told(places=[0, 1], predicted_ids=[1]), "must have one for each place"),
        ("jacobi", told(places=[0], predicted_ids=[5]), "holds id 5, the vocabulary has 5"),
        ("masks", told(places=[0], predictions=rows(65)), "sizes must have 1..64"),
        ("masks", told(places=[0], predictions=rows(0)), "sizes must have 1..64"),
        ("masks", told(places=[0], predictions=rows(2, ids=b"1234")), "another size"),
        ("masks", told(places=[0], predictions=rows(2, weights=bytes(4))), "a weight of 0"),
        (
            "masks",
            told(places=[0], predictions=rows(2), masses=[1, 2]),
            "masses must have 1..65535",
        ),
        ("masks", told(places=[0], predictions=rows(2), masses=[0]), "masses must have 1..65535"),
        ("masks", told(places=[0], predictions=rows(2), masses=[65536]), "must have 1..65535"),
        ("jacobi", told(places=[0], predicted_ids=[1], masses=[1]), "masses must be empty"),
        ("lookup", told(masses=[1]), "draft.feedback must be empty"),
    ],
    indirect=["drafter"],
)
async def test_predictions_that_were_not_asked_for_are_refused(
    drafter: Any, step: drafter_pb2.SequenceRequest, sentence: str
) -> None:
    code, details = await status_of(Talk(drafter.Draft()), open_draft(), draft_step(), step)
    assert (code, sentence in details) == (INVALID, True), details


@pytest.mark.parametrize("drafter", ["jacobi"], indirect=True)
async def test_predictions_of_another_round_are_left_alone(drafter: Any) -> None:
    """A drafter that took over, or was not asked for a round, knows nothing of its places."""
    for before, now in ((1, 3), (0, 2)):
        call = Talk(drafter.Draft())
        await call.ask(open_draft())
        await call.ask(draft_step())
        feedback = common_pb2.Feedback(round=before, places=[0, 9], predicted_ids=[2, 3])
        step = draft_step(round=now, position=4, new_token_ids=[1], feedback=[feedback])
        drafted = (await call.ask(step)).drafted
        assert list(drafted.draft.token_ids) == [1, 1, 1]
        call.cancel()


def info_of(probes: int = 0, extra: int = 0, top: int = 0) -> drafter_pb2.GetModelInfoResponse:
    return drafter_pb2.GetModelInfoResponse(
        info=common_pb2.ModelInfo(model="masks", max_gamma=16),
        shape=common_pb2.DRAFT_SHAPE_CHAIN,
        feedback=common_pb2.FeedbackSpec(top=top),
        probes=probes,
        probe_tokens=extra,
    )


@pytest.mark.parametrize(
    ("nodes", "reply", "sentence"),
    [
        (0, info_of(20), r"up to 20 probes.* takes 0 tokens in all: raise its MAX_NODES"),
        (20, info_of(20), r"takes 20 tokens in all"),
        (64, info_of(20, 4), r"name 4 extra embeddings.* has 2: set the target's EXTRA_EMB"),
        (64, info_of(0, 0, 300), r"reads the 300 likeliest tokens, and targets tell 256"),
    ],
)
def test_a_drafter_that_a_target_cannot_serve_is_refused(
    nodes: int, reply: drafter_pb2.GetModelInfoResponse, sentence: str
) -> None:
    own = common_pb2.ModelInfo(model="target", max_nodes=nodes)
    target = target_pb2.GetModelInfoResponse(info=own, probe_tokens=2)
    with pytest.raises(Unavailable, match=sentence):
        require_feedback(target, reply)


def test_room_for_probes_is_left_beside_a_draft() -> None:
    own = common_pb2.ModelInfo(max_nodes=30, max_gamma=16, max_message_bytes=1 << 22)
    target = target_pb2.GetModelInfoResponse(info=own, probe_tokens=4)
    chain = capabilities_of([target], [info_of(20, 4)])
    assert (chain.largest, chain.beside) == (DraftSize(10), 30)
    tree = info_of(20)
    tree.shape, tree.info.max_nodes = common_pb2.DRAFT_SHAPE_TREE, 28
    trees = capabilities_of([target], [tree])
    assert (trees.largest.nodes, trees.beside) == (10, 20)
    assert capabilities_of([target], [info_of()]).beside == 0
    assert chain.takes(target)
    fewer = target_pb2.GetModelInfoResponse(info=own, probe_tokens=3)
    assert not chain.takes(fewer)


async def test_extra_embeddings_of_another_model_end_the_start(
    random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    model = str(random_pair[1])
    cases: list[tuple[torch.Tensor | None, str, str]] = [
        (None, "", r"no extra embeddings in .*: there is no extra_embeddings.safetensors"),
        (
            torch.zeros(2, 16),
            "ab" * 32,
            r"are for another target: its weights have the fingerprint abababababab",
        ),
        (torch.zeros(2, 15), "", r"have the shape \[2, 15\]; the model's have 16 numbers each"),
    ]
    for number, (own, made_for, sentence) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        if own is not None:
            write_extra_embeddings(folder, own, MadeFor(made_for))
        settings = TargetSettings(model=model, extra_embeddings=str(folder))
        with capture_logs():
            async with AsyncExitStack() as stack:
                server = await start(stack, make_target(settings))
                with pytest.raises(StartupError, match=sentence):
                    await server.ready()
    (folder / "extra_embeddings.safetensors").write_bytes(b"torn")
    settings = TargetSettings(model=model, extra_embeddings=str(folder))
    with capture_logs():
        async with AsyncExitStack() as stack:
            server = await start(stack, make_target(settings))
            with pytest.raises(StartupError, match=r"cannot read .*extra_embeddings.safetensors"):
                await server.ready()


async def test_what_the_targets_own_drafter_wants_is_not_sent(
    random_pair: tuple[Path, Path],
) -> None:
    """Of a text whose drafter was told something, and is gone: its rounds are the target's own."""
    settings = TargetSettings(model=str(random_pair[1]), engine="torch", drafts="jacobi")
    async with AsyncExitStack() as stack:
        server = await start(stack, make_target(settings))
        await server.ready()
        target = target_pb2_grpc.TargetServiceStub(await connect(stack, address_of(server)))
        call = Talk(target.Verify())
        await call.ask(open_verify(feedback=spec(2), max_nodes=8, max_new_tokens=20))
        verdict = (await call.ask(verify_step(draft=probed(), feedback=True))).verdict
        assert verdict.HasField("feedback")
        run = target_pb2.RunStep(round=2, position=verdict.position, rounds=1, gamma=2)
        own = (await call.ask(target_pb2.SequenceRequest(run=run))).verdict
        assert own.HasField("drafted")
        assert not own.HasField("feedback")
