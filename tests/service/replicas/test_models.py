"""Replicas that change their model: a text ends with the model that it began with."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tokenizers import Tokenizer, models

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.waiting import until
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeTarget
from tests.support.wire.fleet import NAME, Fleet, fleet, held, serves

__all__ = ["fleet"]  # a fixture of all files of replicas


async def test_another_model_behind_a_name_gets_no_text(fleet: Fleet) -> None:
    old, new = FakeTarget(), FakeTarget(fingerprint="another", wraps=5)
    await fleet.start(old, old, new)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    texts = await asyncio.gather(*(fleet.text() for _ in range(24)))
    assert all(list(text.token_ids) == old.text(20) for text in texts)
    assert new.opened == 0
    assert {opening.fingerprint for opening in old.openings} == {"fake"}


async def test_the_new_model_serves_when_nothing_of_the_old_is_left(fleet: Fleet) -> None:
    """As a rolling update does it; the tokenizer may be another too."""
    old, new = FakeTarget(), FakeTarget(fingerprint="another", wraps=5, tokenizer_fingerprint="n")
    new.tokenizer_json = Tokenizer(models.WordLevel({"n": 0}, unk_token="n")).to_str().encode()
    await fleet.start(old)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    async with held(old) as go_on:
        text = asyncio.ensure_future(fleet.text())
        await until(lambda: old.opened == 1)
        hosts = await fleet.start(new, new)
        await until(lambda: new.asked == 2)
        # They are more than the old one, and wait.
        assert await serves(fleet, old)
        assert new.opened == 0
        fleet.names.records[NAME] = hosts
        await until(fleet.is_of("another"))
        # A text ends by the law that it began with.
        go_on.set()
        assert list((await text).token_ids) == old.text(20)
    reply = await fleet.text()
    assert list(reply.token_ids) == new.text(20)
    assert {opening.fingerprint for opening in new.openings} == {"another"}
    info = await fleet.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.target.tokenizer_fingerprint == "n"


async def test_one_that_restarts_with_another_model_is_asked_anew(fleet: Fleet) -> None:
    old, new = FakeTarget(), FakeTarget(fingerprint="another", wraps=5)
    host, _ = await fleet.start(old, old)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    await fleet.kill(host)
    await fleet.serve(host, new)
    await until(lambda: new.asked)
    for _ in range(10):
        assert list((await fleet.text()).token_ids) == old.text(20)
    assert new.opened == 0


async def test_a_text_never_moves_to_another_model(fleet: Fleet) -> None:
    old, new = FakeTarget(), FakeTarget(fingerprint="another")

    async def lose(round_: int | None, context: FakeContext) -> None:
        if round_ == 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    await fleet.start(old)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    old.interfere = lose
    await fleet.start(new)
    await until(lambda: new.asked)
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await fleet.text()
    assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
    assert new.opened == 0
