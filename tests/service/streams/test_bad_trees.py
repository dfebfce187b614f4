"""Drafts with malformed branches, and drafters and targets that do not suit each other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.peers.replicas.compatibility import rules_of
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.messages import verifier_infos
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import Stack, address_of, connect, start
from tests.service.requests.test_orchestrator import refusal
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate
from tests.support.wire.steps import INVALID, open_verify, status_of, verify_step
from tests.support.wire.talk import Talk

TREE, IID_CHAINS = common_pb2.DRAFT_SHAPE_TREE, common_pb2.DRAFT_SHAPE_IID_CHAINS


def rows(*weights: dict[int, int]) -> common_pb2.Rows:
    ids = np.array([token for row in weights for token in row], "<u4")
    numbers = np.array([weight for row in weights for weight in row.values()], "<u2")
    return common_pb2.Rows(
        sizes=[len(row) for row in weights], ids=ids.tobytes(), weights=numbers.tobytes()
    )


TWO = rows({0: 9, 1: 5, 2: 65535}, {3: 65535, 4: 7})


def tree(**changes: Any) -> target_pb2.SequenceRequest:
    """Two draws from one row, and one after each."""
    fields: dict[str, Any] = {
        "token_ids": [2, 0, 3, 4],
        "parents": [0, 0, 1, 2],
        "row_of": [0, 0, 1, 1],
        "rows": TWO,
    }
    return verify_step(draft=common_pb2.Draft(**(fields | changes)))


def opened(verifier: str = "block", **changes: Any) -> target_pb2.SequenceRequest:
    return open_verify(verifier=verifier, max_nodes=8, **changes)


@pytest.mark.parametrize("verifier", ["token", "block", "spectr", "gbv"])
async def test_a_sound_tree_is_decided(stack: Stack, verifier: str) -> None:
    call = Talk(stack.target.Verify())
    await call.ask(opened(verifier))
    verdict = (await call.ask(tree())).verdict
    assert len(verdict.overlaps) == 4
    assert verdict.num_accepted == [0, 1, 1, 2, 2][verdict.place]
    call.cancel()


REFUSED: list[tuple[target_pb2.SequenceRequest, target_pb2.SequenceRequest | None, str]] = [
    (opened(), tree(parents=[0, 2, 1, 2]), "draft.parents[1] = 2 does not come before"),
    (opened(), tree(parents=[0, 0, 1]), "draft.parents holds 3 places for 4"),
    (open_verify(max_nodes=3), tree(), "draft.token_ids holds 4 tokens, the limit is 3"),
    (open_verify(), tree(), "open announced no max_nodes"),
    (
        open_verify(max_nodes=16),
        tree(token_ids=[1, *[0] * 9], parents=[0, 0, *range(2, 10)], row_of=[], rows=None),
        "draft.parents: a path of 9, the limit is 8",
    ),
    (opened(max_new_tokens=2), tree(), "a path of 2 tokens; max_new_tokens leaves 1"),
    (opened(), tree(row_of=[0, 0, 1, 2]), "draft.row_of names row 2 of 2"),
    (opened(), tree(row_of=[0, 0, 0, 0]), "holds row 1, which no token names"),
    (opened(), tree(token_ids=[2, 0, 3, 2]), "draft.token_ids[3] = 2 is outside its row"),
    (
        opened(),
        tree(token_ids=[2, 2, 3, 4], parents=[0, 0, 1, 1], distinct_siblings=True),
        "draft.token_ids[1] = 2 repeats one of its distinct siblings",
    ),
    (opened(), tree(token_ids=[2, 2, 3, 4]), "draft.parents[3] = 2 is after a repeated"),
    (
        opened("spectr"),
        tree(row_of=[0, 2, 1, 1], rows=rows({2: 9, 0: 1}, {3: 9, 4: 1}, {0: 1, 1: 1})),
        "draft.row_of[1] = 2: draws at one place must share their row",
    ),
    (opened("gbv"), tree(parents=[0, 0, 1, 1]), "2 draws at place 1, which 1 chains reach"),
    (opened("gbv"), tree(distinct_siblings=True), "the verifier takes independent chains"),
    (open_verify(verifier="greedy_block", gamma=2), tree(), "open announced no max_nodes"),
    (
        open_verify(verifier="greedy_block", gamma=2, max_nodes=4),
        tree(),
        "draft.parents: the verifier takes chains of a row a token",
    ),
    (open_verify(max_nodes=65), None, "open.max_nodes must be 0..64, got 65"),
]


async def test_a_target_refuses(stack: Stack) -> None:
    close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
    for opening, step, sentence in REFUSED:
        bystander = Talk(stack.target.Verify())
        await bystander.ask(opened())
        requests = [opening] if step is None else [opening, step]
        code, details = await status_of(Talk(stack.target.Verify()), *requests)
        assert (code, sentence in details) == (INVALID, True), (sentence, code, details)
        assert (await bystander.ask(tree())).verdict.position > 4, sentence
        assert await stack.open_sequences() == 1, sentence
        await bystander.write(close)
        assert (await bystander.end())[0] == grpc.StatusCode.OK, sentence
        assert await stack.open_sequences() == 0, sentence


async def test_a_target_that_cannot_mask_takes_chains_alone(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "takes_trees", False)
    async with AsyncExitStack() as stack:
        server = await start(stack, make_target(TargetSettings(model=str(random_pair[1]))))
        stub: Any = target_pb2_grpc.TargetServiceStub(await connect(stack, address_of(server)))
        await server.ready()
        info = (await stub.GetModelInfo(target_pb2.GetModelInfoRequest())).info
        assert info.max_nodes == 0
        code, details = await status_of(Talk(stub.Verify()), opened())
        assert (code, "this target's model takes chains alone" in details) == (INVALID, True)
        call = Talk(stub.Verify())
        await call.ask(open_verify())
        assert (await call.ask(verify_step())).HasField("verdict")
        call.cancel()


async def test_a_drafter_of_trees_needs_a_target_that_takes_them() -> None:
    drafter = FakeDrafter(model="guesser", max_nodes=8)
    drafter.shape = TREE
    details = await refusal(
        drafter,
        FakeTarget(model="judge"),
        sentence="a drafter (guesser, fake) drafts trees, and the target (judge) takes chains",
    )
    assert "127.0.0.1" not in details


@pytest.mark.parametrize(
    ("shape", "pure", "taken"),
    [
        (common_pb2.DRAFT_SHAPE_CHAIN, True, ["block", "gbv", "greedy_block", "spectr", "token"]),
        (common_pb2.DRAFT_SHAPE_CHAIN, False, ["block", "gbv", "spectr", "token"]),
        (TREE, True, ["block", "token"]),
        (IID_CHAINS, True, ["block", "gbv", "spectr", "token"]),
    ],
)
def test_rules_are_offered_for_drafts_that_they_take(
    shape: common_pb2.DraftShape.ValueType, pure: bool, taken: list[str]
) -> None:
    target = target_pb2.GetModelInfoResponse(verifiers=verifier_infos())
    drafter = drafter_pb2.GetModelInfoResponse(shape=shape, pure=pure)
    offered = rules_of(target, [drafter])
    known = {"block", "gbv", "greedy_block", "spectr", "token"}
    assert [name for name in offered if name in known] == taken


async def test_a_default_rule_that_does_not_take_the_drafts_cannot_start() -> None:
    drafter = FakeDrafter(max_nodes=8)
    drafter.shape = TREE
    with pytest.raises(StartupError, match=r"'block' .* does not suit the drafter; use one of"):
        async with orchestrate(drafter, FakeTarget(max_nodes=8)):
            pass
