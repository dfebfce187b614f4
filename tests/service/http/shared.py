"""One pair of fronts for all tests of a file, where they change nothing about the services.

A file imports both fixtures, and has the module's loop: `pytestmark = IN_ONE_LOOP`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.service.http.conftest import Fronts, serving_http
from tests.support.waiting import until

IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fronts(embedded_pair: tuple[Path, Path]) -> AsyncIterator[Fronts]:
    """With default settings, gamma 4."""
    async with serving_http(embedded_pair) as fronts:
        yield fronts


@pytest_asyncio.fixture(loop_scope="module")
async def fronts(shared_fronts: Fronts) -> AsyncIterator[Fronts]:
    """For one test, which leaves nothing open to the next."""
    yield shared_fronts

    async def idle() -> bool:
        return await shared_fronts.services.open_sequences() == 0

    await until(idle)
