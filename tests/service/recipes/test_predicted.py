"""Methods that draft by what the target tells, through real sockets: the law, and greedy texts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.exactness import Case, counts_at, target_law
from tests.service.conftest import address_of, connect, start
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.probes import extra_rows
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.wire.fakes import generation

TEXTS = 500
SMALLEST_P = 1e-4
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "jacobi": ({}, 0),
    "lookahead": (
        {"lookahead_window": 3, "lookahead_ngram": 3, "lookahead_candidates": 3},
        6,
    ),
    "masks": ({"masks": 2, "masks_top": 8}, 0),
}


@pytest.mark.parametrize("method", METHODS)
async def test_texts_follow_the_targets_law(
    method: str, random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    keys, nodes = METHODS[method]
    small, large = random_pair
    target_settings = TargetSettings(
        model=str(large), extra_embeddings=extra_rows(tmp_path, large, 3)
    )
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(method=method, **keys)))
        target = await start(stack, make_target(target_settings))
        server = await start(
            stack,
            make_orchestrator(
                OrchestratorSettings(
                    drafters=(address_of(drafter),),
                    targets=(address_of(target),),
                    stage_floor_seconds=60.0,
                    draft_seconds=60.0,
                )
            ),
        )
        await server.ready()
        case = Case("block", 3, "dense", nodes)
        counts = await counts_at(address_of(server), case, range(TEXTS))
        assert chi_square_p_value(counts, target_law(large)) > SMALLEST_P
        assert chi_square_p_value(counts, target_law(small)) < SMALLEST_P
        channel = await connect(stack, address_of(server))
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        accepted = 0
        for prompt in range(1, VOCAB_SIZE):
            texts = []
            for gamma in (0, 3):
                size = {"max_nodes": nodes} if nodes and gamma else {}
                message = generation(
                    prompt_token_ids=[prompt, 2],
                    sampling={"temperature": 0.0},
                    stopping={"max_new_tokens": 24, "ignore_eos": True},
                    speculation={"gamma": gamma, **size},
                )
                reply = await stub.Complete(pb.CompleteRequest(generation=message))
                texts.append(list(reply.token_ids))
                assert bool(reply.summary.feedback_bytes) == bool(gamma)
                accepted += reply.summary.accepted_tokens
            assert texts[0] == texts[1]
        assert accepted
