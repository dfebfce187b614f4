"""A seed's text stays what it is, from one release to the next.

`seeded_texts.json` holds texts of the embedded pair in float32 with fixed draft lengths. A change
of the law's code that moves a single random number, or the order of a row, changes most of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tests.support.processes.services import trio

ALL = pytest.mark.campaign(
    "a seed keeps producing the same text, all texts, and by OpenVINO",
    "half of the texts by torch, with every rule and sampling (this file); "
    "unit/inference/openvino: its logits",
)

TEXTS = json.loads((Path(__file__).parent / "seeded_texts.json").read_text())


# The second half has the same settings, with other prompts and seeds.
@pytest.mark.parametrize(
    ("engine", "texts"),
    [
        pytest.param("torch", TEXTS[: len(TEXTS) // 2], id="torch"),
        pytest.param("torch", TEXTS, id="torch, all", marks=ALL),
        pytest.param("openvino", TEXTS, id="openvino", marks=ALL),
    ],
)
def test_texts_of_given_seeds_are_what_they_were(
    engine: str, texts: list[dict[str, Any]], embedded_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter, target = ({"MODEL": str(model), "ENGINE": engine} for model in embedded_pair)
    with (
        trio(tmp_path, drafter=drafter, target=target) as services,
        grpc.insecure_channel(services.orchestrator.address) as channel,
    ):
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        for text in texts:
            generation = pb.Generation(
                prompt=text["prompt"],
                sampling=common_pb2.Sampling(**text["sampling"]),
                stopping=pb.Stopping(max_new_tokens=text["max_new_tokens"], ignore_eos=True),
                speculation=pb.Speculation(verifier=text["verifier"], gamma=text["gamma"]),
            )
            reply = stub.Complete(pb.CompleteRequest(generation=generation))
            case = {name: value for name, value in text.items() if name != "token_ids"}
            assert list(reply.token_ids) == text["token_ids"], case
