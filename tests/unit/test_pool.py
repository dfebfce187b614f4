"""Which replica gets the next text."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from orchestrator.pool import Pool
from tandem.errors import InvalidRequest, Unavailable


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool((), ("127.0.0.1:1", "127.0.0.1:2"), connect_seconds=0.1)
    yield pool
    await pool.close()


async def test_the_one_with_the_fewest_texts_is_picked(pool: Pool) -> None:
    with pool.pick_target().lease() as first, pool.pick_target().lease() as second:
        assert first is not second


async def test_one_that_is_gone_does_not_attract_all_texts(pool: Pool) -> None:
    gone = pool.pick_target()
    with pytest.raises(Unavailable), gone.lease():
        raise Unavailable("gone")
    other = pool.pick_target()
    assert other is not gone
    with other.lease():
        assert pool.pick_target() is other
        gone.failed_at -= 60
        assert pool.pick_target() is gone


async def test_a_bad_request_is_not_the_replicas_failure(pool: Pool) -> None:
    replica = pool.pick_target()
    with pytest.raises(InvalidRequest), replica.lease():
        raise InvalidRequest("temperature")
    assert pool.pick_target() is replica
