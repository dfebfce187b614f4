"""How long a text may be, and what else replicas have in common."""

from __future__ import annotations

import pytest

from tandem.common.v1 import common_pb2
from tandem.peers.replicas.compatibility import common_limits, longest_text


@pytest.mark.parametrize(
    ("cache_tokens", "nodes", "longest"),
    [(0, 16, 128), (1024, 16, 128), (128, 0, 128), (128, 16, 112), (8, 16, 0)],
)
def test_the_nodes_of_a_draft_have_room_beside_it(
    cache_tokens: int, nodes: int, longest: int
) -> None:
    info = common_pb2.ModelInfo(max_length=128, cache_tokens=cache_tokens)
    assert longest_text(info, nodes) == longest


def test_the_smallest_cache_counts_and_none_is_endless() -> None:
    infos = [common_pb2.ModelInfo(cache_tokens=tokens) for tokens in (0, 300, 200)]
    assert common_limits(infos).cache_tokens == 200
    assert common_limits(infos[:1]).cache_tokens == 0


def test_the_most_changes_of_weights_count() -> None:
    infos = [common_pb2.ModelInfo(weights_version=version) for version in (1, 4, 0)]
    assert common_limits(infos).weights_version == 4
