"""Between the messages of the common package and the domain: the one edge where they meet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest
from tandem.speculation.draft import Draft
from tandem.speculation.probes import NO_PROBES, Probes
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.request.shaping import NO_SHAPING, Grammar, GrammarKind, Shaping
from tandem.speculation.tree import DraftShape
from tandem.telemetry.stages import StageTimes

PROTOCOL_VERSION = 2
MAX_REQUEST_ID = 128
_MAX_CACHE_SALT = 128
# Ids that end a text: a model's own, and those of a request.
MOST_ENDS = 256

_SHAPES = {
    DraftShape.CHAIN: common_pb2.DRAFT_SHAPE_CHAIN,
    DraftShape.TREE: common_pb2.DRAFT_SHAPE_TREE,
    DraftShape.IID_CHAINS: common_pb2.DRAFT_SHAPE_IID_CHAINS,
}


def part_of(request_id: str, number: int) -> str:
    """The id of a part of a request that has several."""
    suffix = f"-{number}"
    return request_id[: MAX_REQUEST_ID - len(suffix)] + suffix


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
            shaping=_shaping_from(message.shaping) if message.HasField("shaping") else NO_SHAPING,
        )
    except ValueError as error:
        raise InvalidRequest(f"sampling.{error}") from None


def _shaping_from(message: common_pb2.Shaping) -> Shaping:
    if len(message.end_token_ids) > MOST_ENDS:
        raise InvalidRequest(f"sampling.shaping.end_token_ids may hold {MOST_ENDS} ids")
    kind = message.WhichOneof("grammar")
    try:
        return Shaping(
            logit_bias=tuple(sorted(message.logit_bias.items())),
            repetition_penalty=message.repetition_penalty
            if message.HasField("repetition_penalty")
            else 1.0,
            frequency_penalty=message.frequency_penalty,
            presence_penalty=message.presence_penalty,
            min_tokens=message.min_tokens,
            end_token_ids=tuple(message.end_token_ids),
            bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
            grammar=None if kind is None else Grammar(GrammarKind(kind), getattr(message, kind)),
        )
    except ValueError as error:
        raise InvalidRequest(f"sampling.shaping.{error}") from None


def sampling_to(sampling: Sampling) -> common_pb2.Sampling:
    """Every parameter set; of the shaping, what differs from none."""
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        shaping=_shaping_to(sampling.shaping) if sampling.shaping else None,
    )


def _shaping_to(shaping: Shaping) -> common_pb2.Shaping:
    message = common_pb2.Shaping(
        logit_bias=dict(shaping.logit_bias),
        repetition_penalty=shaping.repetition_penalty,
        frequency_penalty=shaping.frequency_penalty,
        presence_penalty=shaping.presence_penalty,
        min_tokens=shaping.min_tokens,
        end_token_ids=shaping.end_token_ids,
        bad_words=[common_pb2.Shaping.Word(token_ids=word) for word in shaping.bad_words],
    )
    if shaping.grammar is not None:
        setattr(message, shaping.grammar.kind.value, shaping.grammar.text)
    return message


def draft_from(
    message: common_pb2.Draft,
    vocab_size: int,
    max_gamma: int,
    max_nodes: int = 0,
    probe_tokens: int = 0,
) -> Draft:
    """A draft of sound shape; what is in its rows is checked with those of its batch.

    Args:
        message: as it came.
        vocab_size: the target's.
        max_gamma: the greatest depth.
        max_nodes: the most nodes and probes; 0 allows chains without probes alone.
        probe_tokens: extra embeddings that probes may name.

    Raises:
        InvalidRequest: it is not what it says.
    """
    count = len(message.token_ids)
    most = (max_nodes if message.parents else max_gamma) or max_gamma
    if count > most:
        raise InvalidRequest(f"draft.token_ids holds {count} tokens, the limit is {most}")
    probes = NO_PROBES
    if message.HasField("probes"):
        most = max(max_nodes - count, 0)
        if len(message.probes.token_ids) > most:
            raise InvalidRequest(
                f"draft.probes.token_ids holds {len(message.probes.token_ids)} probes, and"
                f" open.max_nodes leaves room for {most} beside {count} tokens"
            )
        probes = Probes(tuple(message.probes.token_ids), tuple(message.probes.parents))
    rows = message.rows
    if len(rows.ids) % 4 or len(rows.weights) % 2:
        raise InvalidRequest("draft.rows.ids and draft.rows.weights must hold whole numbers")
    parents, row_of = _branches_of(message, count)
    if parents is not None and not max_nodes:
        raise InvalidRequest("draft.parents: open announced no max_nodes, so a draft is a chain")
    if len(rows.sizes) > count:
        raise InvalidRequest(
            f"draft.rows.sizes holds {len(rows.sizes)} rows for {count} tokens:"
            " a row that no token names"
        )
    token_ids, sizes = list(message.token_ids), list(rows.sizes)
    if not sizes and not rows.ids and not rows.weights:
        sizes = [0] * count
    draft = Draft(
        token_ids=token_ids,
        sizes=sizes,
        ids=np.frombuffer(rows.ids, "<u4"),
        weights=np.frombuffer(rows.weights, "<u2"),
        parents=parents,
        row_of=row_of,
        distinct=message.distinct_siblings and parents is not None,
        probes=probes,
    )
    try:
        draft.check_shape(vocab_size)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if draft.depth > max_gamma:
        raise InvalidRequest(f"draft.parents: a path of {draft.depth}, the limit is {max_gamma}")
    if message.HasField("probes") and (
        fault := probes.fault(draft.homes(), vocab_size, probe_tokens)
    ):
        raise InvalidRequest(fault)
    return draft


def _branches_of(
    message: common_pb2.Draft, count: int
) -> tuple[list[int] | None, list[int] | None]:
    """Places and rows of a draft's nodes; None each where they are those of a chain."""
    parents, row_of, sizes = message.parents, message.row_of, message.rows.sizes
    rows = len(sizes) or count  # unset, each token has one of its own
    if len(parents) not in (0, count):
        raise InvalidRequest(f"draft.parents holds {len(parents)} places for {count} tokens")
    for i, parent in enumerate(parents):
        if parent > i:
            raise InvalidRequest(f"draft.parents[{i}] = {parent} does not come before its token")
    if len(row_of) not in (0, count):
        raise InvalidRequest(f"draft.row_of holds {len(row_of)} rows for {count} tokens")
    if row_of:
        named = set(row_of)
        if max(named) >= rows:
            raise InvalidRequest(f"draft.row_of names row {max(named)} of {rows}")
        if unnamed := set(range(rows)) - named:
            raise InvalidRequest(f"draft.rows.sizes holds row {min(unnamed)}, which no token names")
    chain = list(range(count))
    return (
        None if list(parents) in ([], chain) else list(parents),
        None if list(row_of) in ([], chain) else list(row_of),
    )


def draft_to(draft: Draft) -> common_pb2.Draft:
    """As little-endian bytes; no rows where all are certain."""
    message = common_pb2.Draft(
        token_ids=draft.token_ids,
        parents=draft.parents or (),
        row_of=draft.row_of or (),
        distinct_siblings=draft.distinct,
    )
    if draft.probes:
        message.probes.token_ids.extend(draft.probes.token_ids)
        message.probes.parents.extend(draft.probes.parents)
    if len(draft.ids) or draft.row_of:
        message.rows.sizes.extend(draft.sizes)
        message.rows.ids = draft.ids.astype("<u4", copy=False).tobytes()
        message.rows.weights = draft.weights.astype("<u2", copy=False).tobytes()
    return message


def shape_to(shape: DraftShape) -> common_pb2.DraftShape.ValueType:
    """A kind of draft as the handshake has it."""
    return _SHAPES[shape]


def times_from(message: common_pb2.StageTimes) -> StageTimes:
    """Stage times of a peer."""
    return StageTimes(
        message.queue_ns,
        message.gather_ns,
        message.forward_ns,
        message.numbers_ns,
        message.batch_size,
    )


def times_to(times: StageTimes) -> common_pb2.StageTimes:
    """Stage times of a reply."""
    message = common_pb2.StageTimes()
    write_times(message, times)
    return message


def write_times(message: common_pb2.StageTimes, times: StageTimes) -> None:
    """Fill in the stage times of a reply, into an empty message."""
    message.queue_ns, message.gather_ns = times.queue_ns, times.gather_ns
    message.forward_ns, message.numbers_ns = times.forward_ns, times.numbers_ns
    message.batch_size = times.batch_size


def tokens_from(field: str, token_ids: Sequence[int], vocab_size: int, limit: int) -> list[int]:
    """A list of ids, its length looked at before it is taken.

    Args:
        field: its name in sentences.
        token_ids: as received.
        vocab_size: bounds the ids.
        limit: most of them.

    Raises:
        InvalidRequest: it is empty or too long, or an id is beyond the vocabulary.
    """
    if not 0 < (count := len(token_ids)) <= limit:
        if not count:
            raise InvalidRequest(f"{field} must not be empty")
        raise InvalidRequest(f"{field} may hold {limit} ids here, got {count}")
    ids = list(token_ids)
    if max(ids) >= vocab_size:
        wrong = next(i for i in ids if i >= vocab_size)
        raise InvalidRequest(f"{field} holds id {wrong}, the vocabulary has {vocab_size} ids")
    return ids


def check_request_id(request_id: str) -> None:
    """Refuse a request id that would spoil logs.

    Raises:
        InvalidRequest: it is too long or not printable.
    """
    if len(request_id) > MAX_REQUEST_ID or not request_id.isprintable():
        raise InvalidRequest(f"request_id must be at most {MAX_REQUEST_ID} printable characters")


def check_cache_salt(salt: str) -> None:
    """Refuse a salt that is too long.

    Raises:
        InvalidRequest: it is.
    """
    if len(salt) > _MAX_CACHE_SALT:
        raise InvalidRequest(f"open.cache_salt must be at most {_MAX_CACHE_SALT} characters")


# Beside the rows of a draft, what is around them in a message.
AROUND_BYTES = 4096
