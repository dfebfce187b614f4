"""Between the messages of the common package and the domain: the one edge where they meet."""

from __future__ import annotations

import numpy as np

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest, Unsupported
from tandem.speculation.draft import Draft
from tandem.speculation.sampling import Sampling
from tandem.telemetry.stages import StageTimes

PROTOCOL_VERSION = 1
MAX_REQUEST_ID = 128


def sampling_from(message: common_pb2.Sampling, default_seed: int | None = None) -> Sampling:
    """Sampling parameters with their stated defaults.

    Args:
        message: as received.
        default_seed: for a message without a seed; None refuses such a message.

    Raises:
        InvalidRequest: a value is out of range, or the seed is missing.
    """
    if not message.HasField("seed") and default_seed is None:
        raise InvalidRequest("sampling.seed must be set")
    try:
        return Sampling(
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            seed=message.seed if message.HasField("seed") else default_seed or 0,
        )
    except ValueError as error:
        raise InvalidRequest(f"sampling.{error}") from None


def sampling_to(sampling: Sampling) -> common_pb2.Sampling:
    """Every parameter set."""
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


def draft_from(message: common_pb2.Draft, vocab_size: int, max_gamma: int) -> Draft:
    """A draft, checked before it is trusted.

    Raises:
        InvalidRequest: it is not what it says.
        Unsupported: it is a tree.
    """
    if message.parents:
        raise Unsupported("draft.parents: trees are not supported yet; send a chain")
    if len(message.support_ids) % 4 or len(message.weights) % 2:
        raise InvalidRequest("draft.support_ids and draft.weights must hold whole numbers")
    draft = Draft(
        np.array(message.token_ids, dtype=np.int64),
        np.array(message.support_sizes, dtype=np.int64),
        np.frombuffer(message.support_ids, dtype="<u4"),
        np.frombuffer(message.weights, dtype="<u2"),
    )
    try:
        draft.check(vocab_size, max_gamma)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return draft


def draft_to(draft: Draft) -> common_pb2.Draft:
    """As little-endian bytes."""
    return common_pb2.Draft(
        token_ids=draft.token_ids.tolist(),
        support_sizes=draft.support_sizes.tolist(),
        support_ids=draft.support_ids.astype("<u4", copy=False).tobytes(),
        weights=draft.weights.astype("<u2", copy=False).tobytes(),
    )


def times_from(message: common_pb2.StageTimes) -> StageTimes:
    """Stage times of a peer."""
    return StageTimes(message.queue_ns, message.forward_ns, message.accept_ns, message.batch_size)


def times_to(times: StageTimes) -> common_pb2.StageTimes:
    """Stage times of a reply."""
    return common_pb2.StageTimes(
        queue_ns=times.queue_ns,
        forward_ns=times.forward_ns,
        accept_ns=times.accept_ns,
        batch_size=times.batch_size,
    )


def check_tokens(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Refuse an empty list, and ids that the vocabulary does not have.

    Raises:
        InvalidRequest: the first such id.
    """
    if not token_ids:
        raise InvalidRequest(f"{field} must not be empty")
    if max(token_ids) >= vocab_size:
        wrong = next(i for i in token_ids if i >= vocab_size)
        raise InvalidRequest(f"{field} holds id {wrong}, the vocabulary has {vocab_size} ids")


def check_request_id(request_id: str) -> None:
    """Refuse a request id that would spoil logs.

    Raises:
        InvalidRequest: it is too long or not printable.
    """
    if len(request_id) > MAX_REQUEST_ID or not request_id.isprintable():
        raise InvalidRequest(f"request_id must be at most {MAX_REQUEST_ID} printable characters")
