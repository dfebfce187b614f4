"""`tandem bench --http`: the same texts as by gRPC, and what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.failure import Failure
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.endpoint import Endpoint
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.tls import ClientTls
from tandem.tools.load.http_generator import HttpLoadGenerator
from tandem.tools.load.requests import requests
from tests.service.http.conftest import IN_ONE_LOOP, Fronts, ServedPair, fronting
from tests.support.processes.authorities import Authority
from tests.support.processes.ports import free_port
from tests.support.processes.services import generation

pytestmark = IN_ONE_LOOP

REQUEST = requests(None, None, 24, 0.7, 3, pb.Speculation(verifier="block", gamma=4))


async def test_texts_are_those_of_grpc(fronts: Fronts) -> None:
    asked = [REQUEST(number) for number in range(6)]
    async with HttpLoadGenerator(fronts.address) as by_http:
        closed = await by_http.closed_loop(asked, 3)
        opened = await by_http.open_loop(asked, 50.0, seed=1)
    for timeline in (*closed, *opened):
        assert timeline.error == ""
        assert timeline.tokens == 24
        assert timeline.time_to_first_token_s > 0
        assert timeline.summary is not None
        assert timeline.summary.new_tokens == 24
        assert timeline.summary.rounds == len(timeline.arrivals)
        assert 0 < timeline.summary.acceptance_rate <= 1
        assert timeline.summary.block_efficiency > 1
    wanted = [
        await fronts.services.orchestrator.Complete(pb.CompleteRequest(generation=each))
        for each in asked
    ]
    rounds = sorted(reply.summary.rounds for reply in wanted)
    assert sorted(t.summary.rounds for t in closed if t.summary) == rounds


async def test_what_fails_is_told(fronts: Fronts) -> None:
    async with HttpLoadGenerator(fronts.address) as by_http:
        refused = await by_http.text(generation("x", max_new_tokens=4, gamma=99))
        late = await by_http.text(generation("x", max_new_tokens=900, gamma=1), timeout_s=0.05)
    assert refused.error.startswith("400: ")
    assert "tandem.gamma" in refused.error
    assert refused.summary is late.summary is None
    assert late.error.startswith("TimeoutError")
    with pytest.raises(Failure, match="no HTTP front answers at"):
        async with HttpLoadGenerator(f"127.0.0.1:{free_port()}"):
            pass
    with pytest.raises(Failure, match="a chat, or a text that is resumed"):
        async with HttpLoadGenerator(fronts.address) as by_http:
            await by_http.text(pb.Generation(first_round=3))


async def test_by_tls_with_a_token(served_pair: ServedPair, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.sign("orchestrator")
    token = "0123456789abcdef0123456789abcdef"
    file = tmp_path / "tokens"
    file.write_text(f"ann {token}\n")
    tls = ClientTls(NamedFile("ca", authority.cert))
    settings = {"tls_cert": own.cert, "tls_key": own.key, "token_file": file}
    async with fronting(served_pair, **settings) as fronts:
        for given, error in ((token, ""), ("", "401: ")):
            place = Endpoint(fronts.address, tls, "orchestrator", given)
            async with HttpLoadGenerator(place) as by_http:
                timeline = await by_http.text(REQUEST(0))
            assert timeline.error[: len(error) or None] == error
