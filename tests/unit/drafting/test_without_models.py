"""Methods without a model need none of what models need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.drafting.choice.built_in import built_in
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Truncation
from tandem.errors import StartupError
from tests.support.repository import ROOT

# `masks` has no model either, and draws.
WITHOUT_MODELS = [
    name for name in METHODS if not built_in(name, RecipeSettings()).checkpoints and name != "masks"
]


@pytest.mark.parametrize("method", WITHOUT_MODELS)
def test_its_service_drafts_where_torch_is_not_installed(method: str) -> None:
    """No model code, no pool, no checkpoint: a whole stream in a process without torch."""
    script = """
import asyncio, sys
sys.modules["torch"] = sys.modules["transformers"] = None
from drafter_svc.servicer import make_service
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2 as pb, drafter_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.server import RunningServer

async def main():
    server = RunningServer("127.0.0.1:0", make_service(DrafterSettings(method=sys.argv[1])))
    await server.start()
    await server.ready()
    async with connect(f"127.0.0.1:{server.port}") as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        call = stub.Draft()
        async def ask(**step):
            await call.write(pb.DraftRequest(requests=[pb.SequenceRequest(sequence=1, **step)]))
            (answer,) = (await call.read()).responses
            return answer
        opened = await ask(open=pb.OpenSequence(
            token_ids=[1, 2, 3, 4, 1], sampling=common_pb2.Sampling(seed=0),
            target_vocab_size=10, max_new_tokens=20))
        assert opened.HasField("opened")
        step = pb.DraftStep(round=1, position=5, new_token_ids=[2], gamma=3)
        drafted = (await ask(draft=step)).drafted
        assert len(drafted.draft.token_ids) <= 3, drafted
        assert not drafted.draft.HasField("rows")
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.drafter, info.info.vocab_size) == (sys.argv[1], 0)
        assert info.stats.open_sequences == 1 and info.stats.forward_passes == 0
        call.cancel()
    await server.stop(1)

asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", script, method],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_masks_says_that_it_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(StartupError, match=r"masks draws tokens.* install tandem\[inference\]"):
        built_in("masks", RecipeSettings()).make((), Truncation(1.0, 0))
