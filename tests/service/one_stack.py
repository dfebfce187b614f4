"""One stack for all tests of a file, where they change nothing about the services.

A file imports both fixtures, and has the module's loop: `pytestmark = IN_ONE_LOOP`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.service.conftest import Stack, serving
from tests.support.waiting import until

IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stack(random_pair: tuple[Path, Path]) -> AsyncIterator[Stack]:
    """All three, ready, serving the random pair."""
    async with serving(random_pair) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared_stack: Stack) -> AsyncIterator[Stack]:
    """For one test, which leaves nothing open to the next."""
    yield shared_stack

    async def idle() -> bool:
        return await shared_stack.open_sequences() == 0

    await until(idle)
