"""A text is the same, id by id, wherever it is drafted and however its rounds are asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.drafting.methods import METHODS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.laws.suited import tried_rules
from tests.support.models.heads import MTP, family_of, is_head, save_random_head
from tests.support.models.probes import extra_rows
from tests.support.wire.fakes import generation

OTHERS = pytest.mark.campaign(
    "a text is the same wherever it is drafted, with every method",
    "a method of each kind (this file); unit/target/test_run_law.py: a run of every method "
    "enumerated",
)

TOKENS = 12
PLACEMENTS = ("drafter", "drafter, prepared", "inside, a round a message", "inside, sixteen ahead")


class Placements:
    """Orchestrators over one pair, by where its drafts are made."""

    def __init__(self, stubs: dict[str, Any]) -> None:
        self._stubs = stubs

    async def text(self, placement: str, **changes: Any) -> tuple[list[int], pb.Summary]:
        """The ids of a text, and its summary."""
        message = generation(stopping={"max_new_tokens": TOKENS, "ignore_eos": True}, **changes)
        call = self._stubs[placement].Generate(pb.GenerateRequest(generation=message))
        events = [event async for event in call]
        ids = [token.id for event in events[:-1] for token in event.round.tokens]
        return ids, events[-1].summary


# A method of each kind; all of them in a campaign.
KINDS = ("model", "tree", "chains", "lookup", "eagle", "masks")


@pytest.fixture(
    params=[
        *(pytest.param(n, marks=() if n in KINDS else OTHERS) for n in METHODS),
        pytest.param(MTP, marks=OTHERS),
    ]
)
async def recipe(
    request: pytest.FixtureRequest,
    random_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[str, Placements]]:
    """A recipe's name, and the random pair in each placement."""
    name = family_of(request.param)
    small, large = map(str, random_pair)
    feedback = "none"
    if is_head(name):
        folder = random_pair[0].parent / request.param
        small = str(save_random_head(folder, request.param, random_pair[1]))
        monkeypatch.setenv("TANDEM_DRAFTER_TARGET", large)
        feedback = "last"
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", small)
    extra = extra_rows(tmp_path, random_pair[1], 4) if name == "masks" else ""
    async with AsyncExitStack() as stack:
        drafters = [
            await start(stack, make_drafter(DrafterSettings(method=name, ahead=nodes)))
            for nodes in (0, 24)
        ]
        stubs = {}
        for placement, rounds in zip(PLACEMENTS, (16, 16, 1, 16), strict=True):
            own = name if placement.startswith("inside") else ""
            drafter = drafters[placement == "drafter, prepared"]
            kind = TargetSettings(
                model=large,
                max_rounds=rounds,
                drafts=own,
                feedback=feedback,
                extra_embeddings=extra,
            )
            target = await start(stack, make_target(kind))
            settings = OrchestratorSettings(
                drafters=(address_of(drafter),),
                targets=(address_of(target),),
                draft_by="target" if own else "drafters",
                ahead="sent",
                # A service that stands still on a busy machine is waited for.
                stage_floor_seconds=60.0,
                draft_seconds=60.0,
            )
            server = await start(stack, make_orchestrator(settings))
            await server.ready()
            channel = await connect(stack, address_of(server))
            stubs[placement] = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        yield name, Placements(stubs)


async def test_a_text_is_the_same_wherever_it_is_drafted(recipe: tuple[str, Placements]) -> None:
    name, placements = recipe
    trees = METHODS[name].drafter.traits.shape.name != "CHAIN"
    for number, rule in enumerate(tried_rules(name)):
        speculation = {"gamma": 3, "verifier": rule.name} | ({"max_nodes": 6} if trees else {})
        for seed, temperature in ((1, 1.0), (2, 0.0))[: 1 if number else 2]:
            sampling = {"seed": seed, "temperature": temperature}
            found = {
                placement: await placements.text(
                    placement, speculation=speculation, sampling=sampling
                )
                for placement in PLACEMENTS
            }
            texts = {placement: ids for placement, (ids, _) in found.items()}
            assert texts == dict.fromkeys(PLACEMENTS, texts["drafter"]), (rule.name, seed)
            assert len(texts["drafter"]) == TOKENS
            counts = {
                (summary.drafted_tokens, summary.accepted_tokens, summary.rounds)
                for _, summary in found.values()
            }
            assert len(counts) == 1, (rule.name, seed, counts)
            # A lookup may have found nothing to draft.
            if METHODS[name].drafter.traits.pure or is_head(name):
                assert min(counts)[0] > 0
