"""Texts of a recipe through real sockets: their law, and the greedy ones."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import grpc
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
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.wire.fakes import generation

TEXTS = 300
SMALLEST_P = 1e-4


async def greedy_summaries(
    drafter_settings: DrafterSettings,
    target_settings: TargetSettings,
    small: Path,
    nodes: int,
    refused: str = "",
) -> list[pb.Summary]:
    """Check that sampled texts follow the target's law, and that greedy ones are those of plain
    decoding. Returns the summaries of the greedy ones with drafts.

    Args:
        drafter_settings: of the recipe.
        target_settings: with its model.
        small: another model, whose law must not pass.
        nodes: most of a draft; 0 for chains.
        refused: a rule that the drafts do not suit.
    """
    large = Path(target_settings.model)
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(drafter_settings))
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
        assert chi_square_p_value(counts, target_law(small)) < SMALLEST_P, "any law would pass"
        channel = await connect(stack, address_of(server))
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        if refused:
            message = generation(speculation={"verifier": refused, "gamma": 3})
            with pytest.raises(grpc.aio.AioRpcError, match=f"'{refused}' .* not suit the drafter"):
                await stub.Complete(pb.CompleteRequest(generation=message))
        found = []
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
                assert gamma or not reply.summary.drafted_tokens
            assert texts[0] == texts[1]
            found.append(reply.summary)
        return found
