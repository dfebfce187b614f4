"""A drafter that lies about its distributions, through sockets: it writes the text itself."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import torch
from transformers import LlamaForCausalLM

from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.speculation.distribution import process
from tandem.speculation.request.sampling import Sampling
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.service.streams.test_bad_trees import rows
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.wire.fakes import FakeDrafter, add_fake, request

_SAMPLING = Sampling(top_k=3)
_TOTAL = 65535


class Liar(FakeDrafter):
    """Knows the target, and sends a token to be rejected, whose row leaves what it wants alone."""

    def __init__(self, target: Path) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self._target = LlamaForCausalLM.from_pretrained(target).eval()

    @torch.inference_mode()
    def law(self, tokens: list[int]) -> list[float]:
        """The target's, after a text."""
        logits = self._target(torch.tensor([tokens])).logits[0, -1:]
        found: list[float] = process(logits, [_SAMPLING])[0].tolist()
        return found

    def wanted(self, law: list[float]) -> int:
        """The least likely token that the target may say."""
        return min((token for token in range(VOCAB_SIZE) if law[token]), key=law.__getitem__)

    def _draft(
        self, request: drafter_pb2.SequenceRequest, tokens: list[int]
    ) -> drafter_pb2.SequenceResponse:
        step = request.draft
        tokens += step.new_token_ids
        law = self.law(tokens)
        goat, wanted = law.index(0.0), self.wanted(law)
        row = {
            token: math.ceil(share * _TOTAL)
            for token, share in enumerate(law)
            if share and token != wanted
        }
        row[goat] = _TOTAL - sum(row.values())
        draft = common_pb2.Draft(token_ids=[goat], rows=rows(row))
        return drafter_pb2.SequenceResponse(
            drafted=drafter_pb2.DraftedStep(round=step.round, position=len(tokens), draft=draft)
        )


async def test_a_liar_writes_a_whole_text_but_for_its_first_and_last_token(
    random_pair: tuple[Path, Path],
) -> None:
    liar = Liar(random_pair[1])
    async with AsyncExitStack() as stack:
        target = await start(stack, make_target(TargetSettings(model=str(random_pair[1]))))
        server = grpc.aio.server()
        await add_fake(liar, server)
        drafter = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        settings = OrchestratorSettings(drafters=(drafter,), targets=(address_of(target),), gamma=4)
        orchestrator = await start(stack, make_orchestrator(settings))
        await orchestrator.ready()
        channel = await connect(stack, address_of(orchestrator))
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        sampling = common_pb2.Sampling(top_k=_SAMPLING.top_k, seed=5)
        text = await stub.Complete(request(sampling=sampling))
    assert not text.summary.drafter_lost
    # The first token comes from the prefill, and nothing is drafted for the last one.
    tokens, chance = [1, text.token_ids[0]], 1.0
    for token in text.token_ids[1:-1]:
        law = liar.law(tokens)
        assert token == liar.wanted(law)
        chance *= law[token]
        tokens.append(token)
    assert chance < 1e-9, "the target itself would hardly ever write it"
