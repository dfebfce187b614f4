"""Machines of one model notice that one of them is gone."""

from __future__ import annotations

import queue

import pytest

from tandem.inference.vllm.other_ranks import free_address
from tandem.inference.vllm.tether import Tether
from tests.support.waiting import HANG_SECONDS, wait_until


def test_each_side_notices_that_the_other_is_gone() -> None:
    port = int(free_address().rpartition(":")[2])
    told: queue.Queue[str] = queue.Queue()
    first, second, third = (Tether(told.put) for _ in range(3))
    first.listen(port)
    second.connect("127.0.0.1", port, 10)
    third.connect("127.0.0.1", port, 10)
    wait_until(lambda: len(first._open) == 3)
    third.close()
    assert told.get(timeout=HANG_SECONDS) == "the machine 127.0.0.1 is gone"
    first.close()
    assert told.get(timeout=HANG_SECONDS) == "the machine 127.0.0.1 is gone"
    second.close()
    assert told.empty()


def test_a_first_machine_that_does_not_come() -> None:
    port = int(free_address().rpartition(":")[2])
    with pytest.raises(OSError, match="refused"):
        Tether(lambda _: None).connect("127.0.0.1", port, 0)
