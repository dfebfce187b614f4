"""What we rely on in grpcio, written down as tests."""

from __future__ import annotations

import asyncio
import gc

import grpc

from tests.service.conftest import Stack
from tests.service.talk import Talk
from tests.service.test_streams import open_verify


async def test_an_abandoned_call_is_cancelled(stack: Stack) -> None:
    """Why grpcio is held below 1.83: from there on a call that is dropped without a cancel
    is never collected (grpc/grpc#43462), and its sequence lives as long as the channel."""
    call = Talk(stack.target.Verify())
    await call.write(open_verify())
    await call.read()
    assert await stack.open_sequences() == 1
    del call
    gc.collect()
    for _ in range(50):
        if not await stack.open_sequences():
            break
        await asyncio.sleep(0.02)
    assert await stack.open_sequences() == 0
    assert tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 83)
