"""Hydra's rows are those of its formula, along each path; with a prefix layer after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig, LlamaModel

from tandem.inference.feed import Feed
from tandem.inference.heads.hydra import HydraHead
from tandem.inference.kv.size import Room
from tests.support.models.heads import HEADS, Weights, eagle_config, random_hydra, source_of

WIDTH, VOCAB_SIZE = 16, 7


class Plain:
    """The heads over a whole path, anew each time."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        self._tensors, self._prefix = tensors, None
        at = "prefix_embeding_layer."
        own = {n.removeprefix(at): t for n, t in tensors.items() if n.startswith(at)}
        if own:
            self._prefix = LlamaModel(LlamaConfig(**config))
            self._prefix.load_state_dict(own, strict=False)

    @torch.inference_mode()
    def row(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """The row after a token whose feature is not known, and the path after that token."""
        state = features[-1, 0].float()
        if self._prefix is not None:
            found = self._prefix(inputs_embeds=features[:, 0].float()[None], use_cache=False)
            state = found.last_hidden_state[0, -1]
        x = torch.cat([state, *self._tensors["embed_tokens.weight"][list(tokens)]])
        at = f"hydra_mlp.{len(tokens) - 1}"
        wide, narrow = (
            {name.removeprefix(f"{at}.{i}."): t for name, t in self._tensors.items()}
            for i in (1, 3)
        )
        kept = linear(x, wide["res_connection.weight"], wide["res_connection.bias"])
        x = kept + silu(linear(x, wide["linear.weight"], wide["linear.bias"]))
        x = x + silu(linear(x, narrow["linear.weight"], narrow["linear.bias"]))
        return self._tensors[f"hydra_lm_head.{len(tokens) - 1}.1.weight"] @ x


@pytest.mark.parametrize("prefix", [False, True])
@torch.inference_mode()
def test_rows_are_those_of_the_paper(prefix: bool) -> None:
    """Two texts in one pass: prompts, paths, and the next round's features."""
    torch.manual_seed(1)
    tensors = random_hydra(WIDTH, VOCAB_SIZE, prefix=prefix)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, WIDTH)
    config = eagle_config(WIDTH, VOCAB_SIZE)
    files = Weights(Path("hydra"), "hydra", config | {"tandem": {"target_layers": 4}}, tensors)
    head = HydraHead(source_of(files, Room(64, 64)))
    plain = Plain(tensors, config)
    assert (head.depths, head.reads, head.positions) == (HEADS, (5,), 64 if prefix else 0)
    states = {t: torch.randn(n, 1, WIDTH).to(torch.bfloat16) for t, n in ((0, 4), (1, 2))}
    tokens = {0: [1, 4, 6, 2], 1: [5, 3]}
    caches = {text: head.reserve(20) for text in states}

    def told(text: int, first: int) -> Feed:
        cache = caches[text]
        assert cache is not None
        part = states[text][first:].view(torch.int16).numpy()
        return Feed(cache, tokens[text][first:], 1, features=[part])

    def behind(text: int, drawn: Sequence[int], parents: Sequence[int]) -> Feed:
        cache = caches[text]
        assert cache is not None
        return Feed(cache, drawn, len(drawn), parents)

    def expect(rows: Tensor, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        assert len(rows) == len(paths)
        for row, (text, path) in zip(rows, paths, strict=True):
            wanted = plain.row(states[text], [tokens[text][-1], *path])
            torch.testing.assert_close(row, wanted, atol=2e-5, rtol=1e-4)

    expect(head.forward([told(0, 0), told(1, 0)]).logits, [(0, []), (1, [])])
    found = head.forward([behind(0, [6, 0], [0, 0]), behind(1, [4], [0])]).logits
    expect(found, [(0, [6]), (0, [0]), (1, [4])])
    expect(head.forward([behind(0, [1, 1, 5], [2, 1, 2])]).logits, [
        (0, [0, 1]),
        (0, [6, 1]),
        (0, [0, 5]),
    ])  # fmt: skip
    for text, cache in caches.items():
        assert cache is not None
        before = len(tokens[text])
        cache.rollback(before)
        tokens[text] += [0, 6]
        states[text] = torch.cat((states[text], torch.randn(2, 1, WIDTH).to(torch.bfloat16)))
    # Texts at different depths share a pass.
    expect(head.forward([told(1, 2), told(0, 4)]).logits, [(1, []), (0, [])])
    expect(head.forward([behind(1, [2], [0])]).logits, [(1, [2])])
    found = head.forward([behind(1, [3], [1]), behind(0, [5], [0])]).logits
    expect(found, [(1, [2, 3]), (0, [5])])
