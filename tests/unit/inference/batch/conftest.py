"""Fixtures that tests of batches share."""

from __future__ import annotations

import pytest

from tests.support.devices.flex import without_compiler


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention by its own operators, and small blocks of the pool."""
    without_compiler(monkeypatch)
