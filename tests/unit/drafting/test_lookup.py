"""Drafts from the text itself: what they are, and that they need no model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.drafting.drafter import DraftSequence
from tandem.drafting.lookup import LookupDrafter
from tandem.speculation.draft import Draft
from tandem.speculation.sampling import Sampling
from tests.support.repository import ROOT


def draft_behind(text: list[int], gamma: int = 4, *, longest: int = 3, window: int = 100) -> Draft:
    drafter = LookupDrafter(longest, window)
    steps = drafter.draft(DraftSequence(text, Sampling(), 100), 1, gamma, gamma)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    draft: Draft = ended.value.value
    return draft


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([7, 2, 3, 9, 8, 2, 3, 6, 5, 2, 3], [6, 5, 2, 3]),  # the latest place
        ([1, 2, 3, 9, 8, 2, 3, 6, 4, 1, 2, 3], [9, 8, 2, 3]),  # the longest run
        ([5, 5, 5, 5], [5]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_a_draft_is_what_followed_the_last_tokens_before(
    text: list[int], drafted: list[int]
) -> None:
    draft = draft_behind(text)
    assert draft.token_ids == drafted
    assert draft.sizes == [0] * len(drafted), "certain"


def test_only_the_window_is_searched() -> None:
    text = [1, 2, 3, *range(10, 30), 1, 2]
    assert draft_behind(text).token_ids == [3, 10, 11, 12]
    assert draft_behind(text, window=20).token_ids == []


def test_what_was_emitted_is_part_of_the_text() -> None:
    drafter = LookupDrafter(3, 100)
    sequence = DraftSequence([1, 2, 3], Sampling(), 100)
    steps = drafter.go_on(sequence, 1, [9, 1, 2], 2)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert ended.value.value.token_ids == [3, 9]


def test_its_service_drafts_where_torch_is_not_installed() -> None:
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
    server = RunningServer("127.0.0.1:0", make_service(DrafterSettings(method="lookup")))
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
        assert list(drafted.draft.token_ids) == [3, 4, 1], drafted
        assert not drafted.draft.HasField("rows")
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.drafter, info.info.vocab_size, info.pure) == ("lookup", 0, False)
        assert info.stats.open_sequences == 1 and info.stats.forward_passes == 0
        call.cancel()
    await server.stop(1)

asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
