"""Each limit of the internal protocols: its most is taken, and one more is refused by name.

The fields come from the messages themselves: one without a row here fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.rpc.streams.server import MAX_REQUESTS
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.service.http.conftest import IN_ONE_LOOP
from tests.support.wire.fields import bounded_fields
from tests.support.wire.steps import (
    INVALID,
    WRONG_STATE,
    draft_step,
    open_draft,
    open_verify,
    status_of,
    verify_step,
)
from tests.support.wire.talk import Talk

pytestmark = IN_ONE_LOOP

LENGTH, GAMMA, NODES, ROUNDS = 2048, 16, 64, 32
FIRST, LAST_ID, LONGEST = 2**64 - 1, 2047, 2**32 - 1
LAYERS = (0, 1, 2, 6)
FEEDBACK = common_pb2.FeedbackSpec(layers=LAYERS, hidden_dtype=common_pb2.HIDDEN_DTYPE_BFLOAT16)

Requests = Sequence[Any]


@dataclass
class Services:
    """The embedded pair's stubs."""

    drafter: Any
    target: Any


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(embedded_pair: tuple[Path, Path]) -> AsyncIterator[Services]:
    small, large = map(str, embedded_pair)
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(model=small, max_length=LENGTH)))
        feedback = "0,1,2,last"
        target = await start(
            stack, make_target(TargetSettings(model=large, feedback=feedback, max_length=LENGTH))
        )
        for each in (drafter, target):
            await each.ready()
        channels = [await connect(stack, address_of(each)) for each in (drafter, target)]
        yield Services(
            drafter_pb2_grpc.DrafterServiceStub(channels[0]),
            target_pb2_grpc.TargetServiceStub(channels[1]),
        )


def shaped(**shaping: Any) -> common_pb2.Sampling:
    return common_pb2.Sampling(seed=0, shaping=common_pb2.Shaping(**shaping))


def words(*sizes: int) -> common_pb2.Sampling:
    return shaped(bad_words=[{"token_ids": [at] * size} for at, size in enumerate(sizes)])


def greedy(**changes: Any) -> target_pb2.SequenceRequest:
    return open_verify(verifier="greedy_block", **{"gamma": 4, **changes})


def levels(count: int, seen: int = 1) -> common_pb2.VerifierCarry:
    level = common_pb2.VerifierCarry.Level(log_ratio=0.0, count=seen)
    return common_pb2.VerifierCarry(levels=[level] * count)


def tree(count: int, **changes: Any) -> list[Any]:
    """A round whose draft is so many children of one token."""
    fields: dict[str, Any] = {"token_ids": range(count), "parents": [0] * count}
    draft = common_pb2.Draft(**(fields | changes))
    return [open_verify(max_nodes=NODES, verifier="token"), verify_step(draft=draft)]


def probed(count: int, parents: int) -> list[Any]:
    """A round with a candidate and probes beside it."""
    probes = common_pb2.Probes(token_ids=[1] * count, parents=[0] * parents)
    draft = common_pb2.Draft(token_ids=[1], probes=probes)
    return [open_verify(max_nodes=NODES), verify_step(draft=draft)]


def run(**fields: Any) -> list[Any]:
    fields = {"round": 1, "position": 4, "rounds": 1, **fields}
    return [open_verify(), target_pb2.SequenceRequest(run=target_pb2.RunStep(**fields))]


def of_openings(open_: Any) -> dict[str, tuple[Requests, Requests | None]]:
    """What openings of both services have in common."""
    at = "open.sampling"
    return {
        "open.token_ids": (
            [open_(token_ids=[1] * (LENGTH - 1), max_new_tokens=1)],
            [open_(token_ids=[1] * (LENGTH + 1), max_new_tokens=1)],
        ),
        f"{at}.top_k": ([open_(sampling=common_pb2.Sampling(seed=0, top_k=LONGEST))], None),
        f"{at}.seed": ([open_(sampling=common_pb2.Sampling(seed=FIRST))], None),
        f"{at}.shaping.logit_bias": (
            [open_(sampling=shaped(logit_bias=dict.fromkeys(range(1024), 1.0)))],
            [open_(sampling=shaped(logit_bias=dict.fromkeys(range(1025), 1.0)))],
        ),
        f"{at}.shaping.min_tokens": ([open_(sampling=shaped(min_tokens=LONGEST))], None),
        f"{at}.shaping.end_token_ids": (
            [open_(sampling=shaped(end_token_ids=range(256), min_tokens=1))],
            [open_(sampling=shaped(end_token_ids=range(257), min_tokens=1))],
        ),
        f"{at}.shaping.bad_words": (
            [open_(sampling=words(*[1] * 256))],
            [open_(sampling=words(*[1] * 257))],
        ),
        f"{at}.shaping.bad_words.token_ids": (
            [open_(sampling=words(64))],
            [open_(sampling=words(65))],
        ),
        "open.first_round": ([open_(first_round=FIRST)], None),
        "open.max_new_tokens": (
            [open_(max_new_tokens=LENGTH - 3)],
            [open_(max_new_tokens=LENGTH - 2)],
        ),
        "open.emitted_tokens": ([open_(emitted_tokens=2)], [open_(emitted_tokens=3)]),
    }


# By field: a sequence that has its most, and one that has one more; None where the field's type
# takes no more.
OF_TARGETS: dict[str, tuple[Requests, Requests | None]] = {
    **of_openings(open_verify),
    "open.carry.levels": ([greedy(carry=levels(3))], [greedy(carry=levels(5))]),
    "open.carry.levels.count": ([greedy(carry=levels(1, 3))], [greedy(carry=levels(1, 4))]),
    "open.gamma": ([greedy(gamma=GAMMA)], [greedy(gamma=GAMMA + 1)]),
    "open.end_token_ids": (
        [open_verify(end_token_ids=range(256))],
        [open_verify(end_token_ids=range(257))],
    ),
    "open.max_nodes": ([open_verify(max_nodes=NODES)], [open_verify(max_nodes=NODES + 1)]),
    "open.feedback.layers": (
        [open_verify(feedback=FEEDBACK)],
        [open_verify(feedback=common_pb2.FeedbackSpec(layers=range(5)))],
    ),
    "open.feedback.prompt_tokens": (
        [
            open_verify(
                feedback=common_pb2.FeedbackSpec(
                    layers=[0],
                    hidden_dtype=common_pb2.HIDDEN_DTYPE_BFLOAT16,
                    prompt_tokens=LONGEST,
                )
            )
        ],
        None,
    ),
    "open.feedback.top": (
        [
            open_verify(
                feedback=common_pb2.FeedbackSpec(top=256, predicted_at=common_pb2.PREDICTED_AT_KEPT)
            )
        ],
        [
            open_verify(
                feedback=common_pb2.FeedbackSpec(top=257, predicted_at=common_pb2.PREDICTED_AT_KEPT)
            )
        ],
    ),
    "open.verifier_options": ([open_verify()], [open_verify(verifier_options={"x": 1.0})]),
    "open.log_probs.top": (
        [open_verify(log_probs=common_pb2.LogProbsSpec(top=20))],
        [open_verify(log_probs=common_pb2.LogProbsSpec(top=21))],
    ),
    "verify.round": ([open_verify(), verify_step(round=FIRST)], None),
    "verify.position": (
        [open_verify(), verify_step(position=4)],
        [open_verify(), verify_step(position=5)],
    ),
    "verify.draft.token_ids": (
        [open_verify(), verify_step(draft=common_pb2.Draft(token_ids=range(GAMMA)))],
        [open_verify(), verify_step(draft=common_pb2.Draft(token_ids=range(GAMMA + 1)))],
    ),
    "verify.draft.parents": (tree(NODES), tree(NODES, parents=[0] * (NODES + 1))),
    "verify.draft.row_of": (tree(4, row_of=range(4)), tree(4, row_of=range(5))),
    "verify.draft.rows.sizes": (
        tree(4, rows=common_pb2.Rows(sizes=[0] * 4)),
        tree(4, rows=common_pb2.Rows(sizes=[0] * 5)),
    ),
    "verify.draft.probes.token_ids": (probed(NODES - 1, NODES - 1), probed(NODES, NODES)),
    "verify.draft.probes.parents": (probed(2, 2), probed(2, 3)),
    "run.round": (run(round=FIRST), None),
    "run.position": (run(position=4), run(position=5)),
    "run.rounds": (run(rounds=ROUNDS), run(rounds=ROUNDS + 1)),
    "run.gamma": (run(), run(gamma=1)),
    "run.max_nodes": (run(max_nodes=LONGEST), None),  # nothing where gamma is 0
}


def step(**changes: Any) -> list[Any]:
    return [open_draft(target_vocab_size=LAST_ID + 1), draft_step(**changes)]


def told(**fields: Any) -> list[Any]:
    return step(feedback=[common_pb2.Feedback(**fields)])


# This drafter asks for no feedback, and takes none; those that ask have tests of their own.
OF_DRAFTERS: dict[str, tuple[Requests, Requests | None]] = {
    **of_openings(lambda **changes: open_draft(**{"target_vocab_size": LAST_ID + 1, **changes})),
    "open.target_vocab_size": ([open_draft(target_vocab_size=LONGEST)], None),
    "draft.round": (step(round=FIRST), None),
    "draft.position": (step(position=3), step(position=4)),
    "draft.new_token_ids": (
        step(new_token_ids=[1] * 17),
        step(new_token_ids=[1] * 21),
    ),
    "draft.gamma": (step(gamma=GAMMA), step(gamma=GAMMA + 1)),
    "draft.max_nodes": (step(max_nodes=3), step(max_nodes=4)),
    "draft.feedback": (step(), told(round=0)),
    "draft.feedback.round": (step(), told(round=FIRST)),
    "draft.feedback.positions": (step(), told(positions=LONGEST)),
    "draft.feedback.places": (step(), told(places=[1])),
    "draft.feedback.predictions.sizes": (
        step(),
        told(predictions=common_pb2.Rows(sizes=[1])),
    ),
    "draft.feedback.predicted_ids": (step(), told(predicted_ids=[1])),
    "draft.feedback.masses": (step(), told(masses=[1])),
    "draft.feedback.first": (step(), told(first=LONGEST)),
}


@pytest.mark.parametrize(
    ("message", "rows"),
    [(target_pb2.SequenceRequest, OF_TARGETS), (drafter_pb2.SequenceRequest, OF_DRAFTERS)],
)
def test_each_field_of_a_sequence_has_its_limit_here(message: Any, rows: dict[str, Any]) -> None:
    assert set(bounded_fields(message.DESCRIPTOR)) == {*rows, "sequence"}


@pytest.mark.parametrize(
    ("name", "field"),
    [("target", field) for field in OF_TARGETS] + [("drafter", field) for field in OF_DRAFTERS],
)
async def test_the_most_is_taken_and_one_more_is_refused(
    services: Services, name: str, field: str
) -> None:
    call = services.target.Verify if name == "target" else services.drafter.Draft
    most, beyond = (OF_TARGETS if name == "target" else OF_DRAFTERS)[field]
    assert await status_of(Talk(call()), *most) == (grpc.StatusCode.OK, "")
    if beyond is None:
        return
    code, sentence = await status_of(Talk(call()), *beyond)
    assert code == (WRONG_STATE if field.endswith("position") else INVALID), sentence
    assert any(part in sentence for part in field.split(".")[1:]), sentence


@pytest.mark.parametrize("name", ["target", "drafter"])
async def test_a_message_has_as_many_requests_as_it_may(services: Services, name: str) -> None:
    kinds: Any = {
        "target": (services.target.Verify, target_pb2.VerifyRequest, target_pb2.SequenceRequest),
        "drafter": (services.drafter.Draft, drafter_pb2.DraftRequest, drafter_pb2.SequenceRequest),
    }
    method, message, request = kinds[name]
    for count, code in ((MAX_REQUESTS, grpc.StatusCode.OK), (MAX_REQUESTS + 1, INVALID)):
        call = method()
        # Of sequences that are not open: to close them is no mistake.
        closes = [request(sequence=FIRST - at) for at in range(count)]
        for each in closes:
            each.close.SetInParent()
        await call.write(message(requests=closes))
        await call.done_writing()
        with suppress(grpc.aio.AioRpcError):
            while (await call.read()) is not grpc.aio.EOF:
                pass
        assert await call.code() == code
