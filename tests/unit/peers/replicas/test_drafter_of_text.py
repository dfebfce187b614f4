"""What a text knows of the drafter that it gets."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.drafter.v1 import drafter_pb2
from tandem.peers.grpc.calls import CountingOn
from tandem.peers.grpc.clients import DrafterClient
from tandem.peers.grpc.deadlines import Deadlines
from tandem.peers.replicas.drafter_of_text import DrafterOfText
from tandem.peers.replicas.replica import Replica
from tandem.peers.text.record import TextRecord


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("ahead", [0, 8])
async def test_traits_of_the_handshake_reach_the_text(
    learns: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(DrafterClient("127.0.0.1:1"), lambda: None, 0.1)
    replica.reply = drafter_pb2.GetModelInfoResponse(learns=learns, ahead=ahead)
    found: list[CountingOn] = []

    def sequence(*given: Any) -> None:
        found.append(given[-1])

    monkeypatch.setattr(replica.client, "sequence", sequence)
    DrafterOfText(Deadlines(1.0, 1.0, 1.0), TextRecord()).begin(replica, None, 1 << 20, 1 << 20)
    (counting,) = found
    assert (counting.learns, counting.prepares) == (learns, ahead > 0)
    await replica.close()
