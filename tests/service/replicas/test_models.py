"""Replicas that change their model: a text ends with the model that it began with."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tokenizers import Tokenizer, models

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.waiting import HANG_SECONDS, until
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


async def test_texts_begin_with_the_model_that_most_targets_serve(fleet: Fleet) -> None:
    """As a rolling update does it; the tokenizer may be another too."""
    old, new = FakeTarget(), FakeTarget(fingerprint="another", wraps=5, tokenizer_fingerprint="n")
    new.tokenizer_json = Tokenizer(models.WordLevel({"n": 0}, unk_token="n")).to_str().encode()
    await fleet.start(old)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    async with held(old) as go_on:
        text = asyncio.ensure_future(fleet.text())
        await until(lambda: old.opened == 1)
        await fleet.start(new)
        await until(lambda: new.asked == 1)
        # As many as the old one: they wait.
        assert await serves(fleet, old)
        assert new.opened == 0
        await fleet.start(new)
        await until(fleet.is_of("another"))
        assert await serves(fleet, new)
        # A text ends by the law that it began with.
        go_on.set()
        assert list((await text).token_ids) == old.text(20)
    reply = await fleet.text()
    assert list(reply.token_ids) == new.text(20)
    assert {opening.fingerprint for opening in new.openings} == {"another"}
    info = await fleet.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.target.tokenizer_fingerprint == "n"


async def test_a_text_of_the_old_model_moves_to_another_old_target(fleet: Fleet) -> None:
    old, spare = FakeTarget(), FakeTarget()
    new = FakeTarget(fingerprint="another", wraps=5)
    first, second = await fleet.start(old, spare)
    await fleet.orchestrate(failover_seconds=HANG_SECONDS)
    await until(fleet.is_serving)
    async with held(old, spare):
        text = asyncio.ensure_future(fleet.text())
        await until(lambda: old.opened + spare.opened == 1)
        await fleet.start(new, new, new)
        await until(fleet.is_of("another"))
        lost, other = (first, spare) if old.opened else (second, old)
        other.interfere = FakeTarget().interfere
        await fleet.kill(lost)
        assert list((await text).token_ids) == old.text(20)
    assert other.opened == 1
    assert new.opened == 0


async def test_a_rollout_fails_no_text_and_mixes_none(fleet: Fleet) -> None:
    """Three pods, one after the other, with a surge, under load all the time."""
    old = [FakeTarget() for _ in range(3)]
    new = [FakeTarget(fingerprint="another", wraps=5) for _ in range(3)]
    hosts = await fleet.start(*old)
    await fleet.orchestrate(failover_seconds=HANG_SECONDS)
    await until(fleet.is_serving)
    texts: list[list[int]] = []
    ended = False

    async def load() -> None:
        while not ended:
            texts.append(list((await fleet.text()).token_ids))

    clients = [asyncio.ensure_future(load()) for _ in range(4)]
    for ready, (pod, gone) in enumerate(zip(new, hosts, strict=True), 1):
        await fleet.start(pod)
        await until(lambda pod=pod: pod.asked)  # type: ignore[misc]
        fleet.names.records[NAME].remove(gone)
        if ready == 2:
            await until(fleet.is_of("another"))
        before = len(texts)
        await until(lambda before=before: len(texts) > before + 8)  # type: ignore[misc]
        await fleet.kill(gone)
    ended = True
    await asyncio.gather(*clients)
    assert texts[0] == old[0].text(20)
    assert texts[-1] == new[0].text(20)
    assert {tuple(text) for text in texts} == {tuple(of.text(20)) for of in (old[0], new[0])}


async def test_named_targets_change_their_model_without_a_pause(fleet: Fleet) -> None:
    """Addresses that are settings stay known when nobody listens there any more."""
    old, new = FakeTarget(), FakeTarget(fingerprint="another", wraps=5)
    host, other = await fleet.start(old, new)
    addresses = tuple(f"{each}:{fleet.port}" for each in (host, other))
    await fleet.orchestrate(targets=addresses, failover_seconds=HANG_SECONDS)
    await until(fleet.is_serving)
    assert await serves(fleet, old)
    await fleet.kill(host)
    # A text that began before the orchestrator saw it would wait for the old model.
    await until(fleet.is_of("another"))
    assert list((await fleet.text()).token_ids) == new.text(20)


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


async def test_one_that_looks_for_faster_passes_is_asked_until_it_has(fleet: Fleet) -> None:
    """What serves it is told to callers, and draft sizes follow from what its passes take."""
    target = FakeTarget(engine="torch", improving=True)
    await fleet.start(target)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    info = await fleet.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.target.engine, info.target.improving) == ("torch", True)
    await until(lambda: target.asked >= 2)
    target.silent = True  # an ask that fails is followed by another
    asked = target.asked
    await until(lambda: target.asked >= asked + 2)
    target.silent = False
    target.info.engine, target.info.improving = "openvino", False
    target.info.pass_times.add(sequences=1, rows=1, nanoseconds=1000)

    async def told() -> bool:
        reply = await fleet.stub.GetModelInfo(pb.GetModelInfoRequest())
        return bool(reply.target == target.info)

    await until(told)
    asked = target.asked
    assert list((await fleet.text()).token_ids) == target.text(20)
    still = [task for task in asyncio.all_tasks() if "_until_improved" in str(task)]
    assert all(task.done() for task in still)
    assert target.asked == asked


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
