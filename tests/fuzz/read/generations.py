"""Mutated requests of clients, given to the orchestrator's code that checks them."""

from __future__ import annotations

from typing import Any

from orchestrator.front.encoder import PromptEncoder
from orchestrator.front.grpc.messages import request_from
from orchestrator.front.queue import QueueLimits
from orchestrator.front.validation import Validator, request_id_of
from orchestrator.text.codec import TextCodec
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.peers.replicas.compatibility import capabilities_of
from tandem.peers.text.record import TextRecord
from tandem.shaping.grammar import Grammars
from tandem.target.v1 import target_pb2
from target_svc.messages import verifier_infos
from tests.fuzz import seeds
from tests.fuzz.read.surface import MessageSurface
from tests.support.laws.shaping import tokenizer_json
from tests.support.models.tiny import VOCAB_SIZE


def _terms() -> Validator:
    info = common_pb2.ModelInfo(
        vocab_size=VOCAB_SIZE,
        max_length=seeds.MAX_LENGTH,
        max_gamma=seeds.MAX_GAMMA,
        max_nodes=seeds.MAX_NODES,
        max_message_bytes=1 << 20,
        shapes_logits=True,
    )
    target = target_pb2.GetModelInfoResponse(info=info, verifiers=verifier_infos())
    shape = common_pb2.DRAFT_SHAPE_IID_CHAINS
    drafter = drafter_pb2.GetModelInfoResponse(info=info, shape=shape, pure=True)
    codec = TextCodec(b"")
    capabilities = capabilities_of([target], [drafter])
    encoder = PromptEncoder(codec, 1, QueueLimits(1, 1.0))
    grammars = Grammars(tokenizer_json, VOCAB_SIZE, ())
    return Validator(capabilities, "block", None, None, 256, codec, encoder, grammars)


class Generations(MessageSurface):
    """A request is refused, or has every value within the pair's limits."""

    name = "generation"
    share = 0.12
    seeds = tuple(pb.GenerateRequest(generation=each) for each in seeds.GENERATIONS)

    def __init__(self) -> None:
        self._terms = _terms()

    async def judge(self, message: Any) -> str:
        request = request_from(message.generation)
        request_id = request_id_of(request)
        accepted = await self._terms.accept(request, request_id, TextRecord(), "")
        stopping, most = accepted.stopping, seeds.MAX_LENGTH
        assert 0 < len(request_id) <= 128
        assert 1 <= stopping.max_new_tokens <= most - len(accepted.prompt_ids) < most
        assert all(0 <= token < VOCAB_SIZE for token in accepted.prompt_ids)
        assert accepted.gamma is None or 0 <= accepted.gamma <= seeds.MAX_GAMMA
        assert accepted.nodes is None or 0 <= accepted.nodes <= seeds.MAX_NODES
        assert accepted.sizes
        return "OK"
