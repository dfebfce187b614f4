"""A drafter that learns while it serves, through real sockets; its trainer says what a test has it
say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from drafter_svc.loading import load
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2, prefix_cache_pb2
from tandem.drafter.v1 import learning_pb2
from tandem.errors import StartupError
from tandem.inference import decoder as decoders
from tandem.inference.decoder import Decoder
from tandem.inference.kv import size
from tandem.online.kept_text import TOP
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.exactness import CELLS, Case, counts_at, target_law
from tests.service.online.serving import FakeTrainer, Served, drafting, served
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import noisy
from tests.support.waiting import until
from tests.support.wire.fakes import generation
from tests.support.wire.scrape import Scraped, families
from tests.support.wire.steps import draft_step, open_draft
from tests.support.wire.talk import Talk


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.online.learning.TrainerProcess", FakeTrainer)
    monkeypatch.setattr("tandem.online.learning._TICK_SECONDS", 0.005)


@pytest.fixture
async def drafter(near_pair: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Served]:
    async with (
        AsyncExitStack() as stack,
        drafting(stack, near_pair[0], tmp_path / "state") as found,
    ):
        yield found


def told(*rows: tuple[list[int], list[int]]) -> common_pb2.Feedback:
    """Predictions of round 1, at the places from 0 on: ids and weights of each."""
    predictions = common_pb2.Rows(
        sizes=[len(ids) for ids, _ in rows],
        ids=b"".join(np.array(ids, "<u4").tobytes() for ids, _ in rows),
        weights=b"".join(np.array(weights, "<u2").tobytes() for _, weights in rows),
    )
    return common_pb2.Feedback(round=1, places=range(len(rows)), predictions=predictions)


FEEDBACK = told(([2, 4], [9, 3]), ([0], [7]))
SECOND = {"round": 2, "position": 4, "new_token_ids": [2, 0], "feedback": [FEEDBACK]}


async def talk_of(drafter: Served, **fields: Any) -> Talk:
    """A sequence that was told of its first round."""
    talk = Talk(drafter.draft())
    await talk.ask(open_draft(**fields))
    await talk.ask(draft_step())
    await talk.ask(draft_step(**SECOND))
    return talk


async def end(talk: Talk) -> None:
    await talk.call.done_writing()
    await talk.end()


async def test_it_asks_for_rows_and_says_that_it_learns(drafter: Served) -> None:
    told_ = await drafter.info()
    assert (told_.feedback.top, told_.feedback.predicted_at) == (TOP, common_pb2.PREDICTED_AT_KEPT)
    assert told_.learns
    assert told_.pure
    assert told_.info.weights_version == 0


async def test_a_device_that_it_learns_on_has_room_for_later_weights(
    drafter: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = drafter.servicer.loaded.models
    assert isinstance(model, Decoder)
    each = model.pool.bytes_per_position
    monkeypatch.setattr(decoders, "memory_of_passes", lambda *_: 0)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    room, weights = model._room(model.backend), 4 * model.about.parameters
    for caches, fits in ((2, True), (1.9, False)):
        free = size.RESERVED + weights + int(caches * 2048 * each)
        monkeypatch.setattr(size, "free_memory", lambda device, free=free: free)
        with nullcontext() if fits else pytest.raises(StartupError, match="ONLINE=0"):
            assert size.cache_size(model.device, each, room) == 2048


async def test_a_text_is_kept_with_its_rows(drafter: Served) -> None:
    await end(await talk_of(drafter))
    await until(lambda: drafter.servicer.loaded.engine.admission.open_sequences == 0)
    drafter.learning.close()
    (text,) = [
        text
        for file in drafter.learning.replay.files()
        for text in drafter.learning.replay.read(file)
    ]
    assert text.token_ids.tolist() == [1, 2, 3, 4, 2, 0]
    assert text.places.tolist() == [3, 4]
    assert text.ids[:, :2].tolist() == [[2, 4], [0, 0]]
    assert text.weights[:, :2].tolist() == [[9, 3], [7, 0]]


@pytest.mark.parametrize("fields", [{"learn": False}, {"cache_salt": "of a tenant"}])
async def test_a_text_that_may_not_be_kept_is_not(drafter: Served, fields: dict[str, Any]) -> None:
    await end(await talk_of(drafter, **fields))
    await end(await talk_of(drafter, learn=True))
    await until(lambda: drafter.servicer.loaded.engine.admission.open_sequences == 0)
    drafter.learning.close()
    assert [file.texts for file in drafter.learning.replay.files()] == [1]


async def test_a_sequence_never_sees_two_versions(
    drafter: Served, near_pair: tuple[Path, Path]
) -> None:
    """Nor does it find prefixes of another one."""
    prompt = [1, 2, 3, 4] * 12
    other = noisy(near_pair[0], 1.0, 5)
    open_ = Talk(drafter.draft())
    first = (await open_.ask(open_draft(token_ids=prompt, max_new_tokens=40))).opened
    await drafter.change(other)
    drafts = []
    for talk, round_ in ((open_, 1), (Talk(drafter.draft()), 1)):
        if talk is not open_:
            second = (await talk.ask(open_draft(token_ids=prompt, max_new_tokens=40))).opened
        step = draft_step(position=len(prompt), round=round_, gamma=6)
        drafts.append((await talk.ask(step)).drafted.draft)
        await end(talk)
    assert (first.weights_version, second.weights_version) == (0, 1)
    assert second.cached_tokens == 0
    assert drafts[0].rows != drafts[1].rows
    again = Talk(drafter.draft())
    third = (await again.ask(open_draft(token_ids=prompt, max_new_tokens=40))).opened
    assert (third.weights_version, third.cached_tokens) == (1, 32)
    await end(again)
    await until(lambda: len(drafter.servicer.loaded.models[0]._backends._all) == 1)  # type: ignore[attr-defined]


async def test_new_weights_draft_as_a_checkpoint_of_them(
    drafter: Served, near_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    other = noisy(near_pair[0], 0.5, 6)
    other.save_pretrained(tmp_path / "other")
    await drafter.change(other)
    drafts = []
    async with (
        AsyncExitStack() as stack,
        drafting(stack, tmp_path / "other", tmp_path / "none", online=0) as plain,
    ):
        for one in (drafter, plain):
            talk = Talk(one.draft())
            await talk.ask(open_draft())
            drafts.append((await talk.ask(draft_step(gamma=8))).drafted.draft)
            await end(talk)
    assert drafts[0] == drafts[1]


async def test_what_was_learnt_outlives_the_process(
    near_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, drafts, prints = tmp_path / "state", [], []
    for start_ in range(2):
        async with AsyncExitStack() as stack, drafting(stack, near_pair[0], folder) as found:
            if not start_:
                await found.change(noisy(near_pair[0], 0.5, 6))
            talk = Talk(found.draft())
            opened = (await talk.ask(open_draft())).opened
            drafts.append((await talk.ask(draft_step())).drafted.draft)
            await end(talk)
            told_ = (await found.info()).info
            prints.append(told_.fingerprint)
            assert opened.weights_version == told_.weights_version == 1
            assert FakeTrainer.newest.order.weights.endswith("00000001.safetensors") == bool(start_)
    assert drafts[0] == drafts[1]
    async with (
        AsyncExitStack() as stack,
        drafting(stack, near_pair[0], folder, online=0) as plain,
    ):
        assert {(await plain.info()).info.fingerprint, *prints} == set(prints[:1])


async def test_what_was_learnt_of_another_checkpoint_is_refused(
    near_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    async with AsyncExitStack() as stack, drafting(stack, near_pair[0], folder) as found:
        await found.change(noisy(near_pair[0], 0.5, 6))
    keys: dict[str, Any] = {"model": str(near_pair[1]), "online": 1, "online_folder": folder}
    with pytest.raises(StartupError, match=r"learnt from weights \w{12}.*ONLINE_ANEW=true"):
        load(DrafterSettings(**keys))
    async with (
        AsyncExitStack() as stack,
        drafting(stack, near_pair[1], folder, online_anew=True) as found,
    ):
        talk = Talk(found.draft())
        assert (await talk.ask(open_draft())).opened.weights_version == 2
        await end(talk)
        state = json.loads((folder / "state.json").read_text())
        assert (state["of"], state["weights"]) == (
            (await found.info()).info.weights_fingerprint,
            "",
        )


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"online_folder": None}, "ONLINE needs ONLINE_FOLDER"),
        ({"method": "lookup"}, "the method lookup does not learn"),
        ({"method": "phrases"}, "the method phrases does not learn"),
    ],
)
def test_a_drafter_that_cannot_learn_says_why(
    near_pair: tuple[Path, Path], tmp_path: Path, keys: dict[str, Any], sentence: str
) -> None:
    own: dict[str, Any] = {"model": str(near_pair[0]), "online": 1, "online_folder": tmp_path}
    with pytest.raises(StartupError, match=sentence):
        load(DrafterSettings(**own | keys))


async def test_administrators_see_and_stop_and_reset_it(
    drafter: Served, near_pair: tuple[Path, Path]
) -> None:
    await drafter.change(noisy(near_pair[0], 0.5, 6))
    await end(await talk_of(drafter))
    status = await drafter.admin.GetLearning(learning_pb2.GetLearningRequest())
    assert (status.weights_version, status.updates, status.steps) == (1, 1, 25)
    assert (status.training, status.frozen, status.problem) == (True, False, "")
    assert (status.overlap.served, status.overlap.trained, status.overlap.forgotten) == (
        0.6,
        0.65,
        0.01,
    )
    frozen = learning_pb2.FreezeLearningRequest(frozen=True)
    await drafter.admin.FreezeLearning(frozen)
    status = await drafter.admin.GetLearning(learning_pb2.GetLearningRequest())
    assert (status.training, status.frozen) == (False, True)
    reset = await drafter.admin.ResetLearning(learning_pb2.ResetLearningRequest())
    assert reset.weights_version == (await drafter.info()).info.weights_version == 2
    scraped = Scraped(await families(drafter.metrics))
    assert scraped.value("tandem_weights_version") == 2
    assert scraped.value("tandem_learning_texts") == 0


async def test_a_drafter_that_does_not_learn_says_so(
    near_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    async with (
        AsyncExitStack() as stack,
        drafting(stack, near_pair[0], tmp_path, online=0) as plain,
    ):
        info = await plain.info()
        assert not info.learns
        assert not info.HasField("feedback")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await plain.admin.GetLearning(learning_pb2.GetLearningRequest())
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not any(path.is_file() for path in tmp_path.rglob("*"))  # noqa: ASYNC240


async def test_texts_keep_their_law_while_weights_change(
    drafter: Served, near_pair: tuple[Path, Path], random_pair: tuple[Path, Path]
) -> None:
    async with served(drafter, near_pair[1]) as (address, _):
        case, counts = Case("block", 3, "dense", 0), np.zeros(CELLS, np.int64)
        for part in range(4):
            texts = counts_at(address, case, range(75 * part, 75 * (part + 1)))
            change = drafter.change(noisy(near_pair[0], 0.1 * part, part))
            found, _ = await asyncio.gather(texts, change)
            counts += found
        assert drafter.learning.status.version == 4
        assert chi_square_p_value(counts, target_law(near_pair[1])) > 1e-4
        assert chi_square_p_value(counts, target_law(random_pair[0])) < 1e-4, "any law would pass"


async def test_greedy_texts_are_the_same_whatever_was_learnt(
    drafter: Served, near_pair: tuple[Path, Path]
) -> None:
    async with served(drafter, near_pair[1]) as (_, stub):
        found = []
        for seed in range(3):
            for gamma in (0, 4):
                message = generation(
                    prompt_token_ids=[1, 2],
                    sampling={"temperature": 0.0},
                    stopping={"max_new_tokens": 40, "ignore_eos": True},
                    speculation={"gamma": gamma},
                )
                reply = await stub.Complete(pb.CompleteRequest(generation=message))
                found.append(list(reply.token_ids))
                assert bool(gamma) == bool(reply.summary.accepted_tokens)
            await drafter.change(noisy(near_pair[0], 0.1, seed))
        assert found == found[:1] * 6


async def test_prefixes_can_still_be_forgotten(
    drafter: Served, near_pair: tuple[Path, Path]
) -> None:
    await drafter.change(noisy(near_pair[0], 0.1, 1))
    asked = prefix_cache_pb2.ForgetPrefixesRequest()
    assert (await drafter.prefixes.ForgetPrefixes(asked)).positions == 0
