"""Errors to gRPC statuses and back: one table."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import structlog

from tandem import errors

_log = structlog.get_logger(__name__)

MAX_SENTENCE = 500

_CODES: dict[type[errors.TandemError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.IdleTimeout: grpc.StatusCode.ABORTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.EngineFailure: grpc.StatusCode.INTERNAL,
}
_ERRORS = {code: error for error, code in _CODES.items()}


@asynccontextmanager
async def status_boundary(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn errors inside the block into a status; whatever is unexpected into INTERNAL."""
    try:
        yield
    except errors.TandemError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        _log.exception("unexpected error in a handler")
        await context.abort(
            grpc.StatusCode.INTERNAL, "internal error; the service's log has the details"
        )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.TandemError) -> NoReturn:
    """End an RPC with the error's status and sentence."""
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    # A status travels in a header; beyond its limit the code itself would be lost.
    await context.abort(code, str(error)[:MAX_SENTENCE])


def from_rpc(peer: str, error: grpc.RpcError) -> errors.TandemError:
    """The error that a failed call of ours stands for.

    Args:
        peer: whom we called, for the sentence.
        error: as grpc.aio raised it.
    """
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    # UNIMPLEMENTED and UNKNOWN from a peer are not the client's doing, nor are cancels
    # that we did not ask for.
    kind = _ERRORS.get(code, errors.Unavailable) if code else errors.Unavailable
    return kind(f"{peer}: {details or code}")
