"""An EAGLE head's rows are those of its layer, computed anew over a whole path by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from tandem.inference.feed import Feed
from tandem.inference.heads.eagle import EagleHead
from tandem.inference.kv.size import Room
from tests.support.models.heads import (
    Weights,
    eagle_config,
    random_eagle,
    random_eagle_3,
    source_of,
)

WIDTH, VOCAB_SIZE, OWN_IDS = 16, 11, (0, 2, 3, 7, 9)
LAYERS = 6
FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


def eagle(kind: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights: "eagle", or "llama" and "qwen3" of EAGLE-3."""
    torch.manual_seed(3)
    config = eagle_config(WIDTH, VOCAB_SIZE)
    if kind == "eagle":
        tensors = random_eagle(WIDTH) | {
            "embed_tokens.weight": torch.randn(VOCAB_SIZE, WIDTH),
            "lm_head.weight": torch.randn(VOCAB_SIZE, WIDTH),
        }
    else:
        config |= {"model_type": kind, "head_dim": WIDTH // 2}
        tensors = random_eagle_3(WIDTH, VOCAB_SIZE, OWN_IDS, head_norms=kind == "qwen3")
    own = {"tandem": {"target_layers": LAYERS}, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    return config | own | changes, tensors


def head_of(config: dict[str, Any], tensors: dict[str, Tensor]) -> EagleHead:
    files = Weights(Path("eagle"), "eagle", config, tensors)
    return EagleHead(source_of(files, Room(256, 256)))


class Plain:
    """The same layer by transformers' modules, without a cache, over one path at a time."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._fused = "layers.0.hidden_norm.weight" in tensors
        self._normed, self._after = (
            bool(config.get(key)) for key in ("norm_before_residual", "norm_output")
        )
        self._tensors = tensors
        kind, layer, rotary = FAMILIES[config["model_type"]]
        shape = {k: v for k, v in config.items() if k not in ("tandem", "model_type")}
        self._config = kind(**shape)
        self._config._attn_implementation = "eager"
        self._layer = layer(self._config, 0).float()
        if self._fused:
            for name in ("q_proj", "k_proj", "v_proj"):
                part = getattr(self._layer.self_attn, name)
                wide = nn.Linear(2 * WIDTH, part.out_features, bias=False)
                setattr(self._layer.self_attn, name, wide)
        own = {n.removeprefix("layers.0."): t for n, t in tensors.items()}
        self._layer.load_state_dict(own, strict=False)
        self._rotary = rotary(self._config)

    def _norm(self, states: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return states * scale * self._tensors[name]

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """The last row and guess after pairs; those without a feature go on with guesses.

        Args:
            tokens: of the pairs.
            features: [n, layers, width] of the first n pairs.
        """
        known = features.flatten(1)
        if self._fused:
            known = linear(known, self._tensors["fc.weight"])
        while True:
            found = self._pass(tokens[: len(known)], known)
            ends = self._norm(found, "norm.weight") if self._fused else found
            guess = ends if self._after else found
            if len(known) == len(tokens):
                logits = linear(ends[-1], self._tensors["lm_head.weight"])
                if self._fused:
                    row = torch.full((VOCAB_SIZE,), -torch.inf)
                    row[list(OWN_IDS)] = logits
                    logits = row
                return logits, guess[-1]
            known = torch.cat((known, guess[-1:]))

    def _pass(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        embedded = self._tensors["embed_tokens.weight"][list(tokens)]
        count = len(tokens)
        turns = self._rotary(embedded, torch.arange(count)[None])
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        layer = self._layer
        if self._fused:
            normed = self._norm(states, "layers.0.hidden_norm.weight")
            token = self._norm(embedded, "layers.0.input_layernorm.weight")
            read, before = torch.cat((token, normed), -1), normed if self._normed else states
        else:
            fused = linear(torch.cat((embedded, states), -1), self._tensors["fc.weight"])
            read = before = fused
        seen, _ = layer.self_attn(read[None], position_embeddings=turns, attention_mask=mask)
        between = before + seen[0]
        found: Tensor = between + layer.mlp(layer.post_attention_layernorm(between))
        return found


def features(count: int, seed: int, layers: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, layers, WIDTH, generator=generator).to(torch.bfloat16)


def sent(states: Tensor) -> np.ndarray:
    """As they come in a message."""
    return states.view(torch.int16).numpy()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("llama", {}),
    ("llama", {"norm_before_residual": True}),
    ("llama", {"norm_output": True}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
@torch.inference_mode()
def test_rows_are_those_of_a_plain_layer(kind: str, changes: dict[str, Any]) -> None:
    """Two texts in one pass: prompts, guesses with branches, and true pairs in their place."""
    config, tensors = eagle(kind, **changes)
    head, plain = head_of(config, tensors), Plain(config, tensors)
    assert head.reads == ((LAYERS + 1,) if kind == "eagle" else (1, 3, 5))
    texts = {0: [1, 4, 9, 2], 1: [5, 8]}
    states = {text: features(len(ids), text, len(head.reads)) for text, ids in texts.items()}
    caches = {text: head.reserve(32) for text in texts}

    def expect(rows: Tensor, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        assert len(rows) == len(paths)
        for row, (text, path) in zip(rows, paths, strict=True):
            wanted, _ = plain.rows([*texts[text], *path], states[text].float())
            torch.testing.assert_close(row, wanted, atol=2e-5, rtol=1e-4)

    def told(text: int, first: int) -> Feed:
        parts = [sent(part) for part in torch.split(states[text][first:], 1)]
        cache = caches[text]
        assert cache is not None
        return Feed(cache, texts[text][first:], 1, features=parts)

    def behind(text: int, tokens: Sequence[int], parents: Sequence[int]) -> Feed:
        cache = caches[text]
        assert cache is not None
        return Feed(cache, tokens, len(tokens), parents)

    expect(head.forward([told(0, 0), told(1, 0)]).logits, [(0, []), (1, [])])
    found = head.forward([behind(0, [7, 3], [0, 0]), behind(1, [6], [0])]).logits
    expect(found, [(0, [7]), (0, [3]), (1, [6])])
    found = head.forward([behind(1, [10], [1]), behind(0, [1, 5, 0], [2, 1, 2])]).logits
    expect(found, [(1, [6, 10]), (0, [3, 1]), (0, [7, 5]), (0, [3, 0])])
    expect(head.forward([behind(0, [8], [4])]).logits, [(0, [7, 5, 8])])
    # Two tokens were kept: their features come, and guesses leave.
    for text, cache in caches.items():
        assert cache is not None
        cache.rollback(len(texts[text]))
        before = len(texts[text])
        texts[text] += [3, 1]
        states[text] = torch.cat((states[text], features(2, 9 + text, len(head.reads))))
        expect(head.forward([told(text, before)]).logits, [(text, [])])
    expect(head.forward([behind(0, [4], [0])]).logits, [(0, [4])])


def test_a_vocabulary_of_its_own_is_told_by_the_targets_ids() -> None:
    config, tensors = eagle("llama")
    head = head_of(config, tensors)
    cache = head.reserve(8)
    assert cache is not None
    states = [sent(features(1, 0, 3))]
    row = head.forward([Feed(cache, [1], 1, features=states)]).logits[0]
    assert head.vocab_size == len(row) == VOCAB_SIZE
    assert row.isfinite().nonzero()[:, 0].tolist() == list(OWN_IDS)


def test_where_the_states_are_kept_is_released() -> None:
    head = head_of(*eagle("eagle"))
    free = head.free_positions
    cache = head.reserve(10)
    assert cache is not None
    assert head.free_positions == free - 10
    head.release(cache)
    assert head.free_positions == free
    assert head.positions >= 256


def test_other_weights_have_another_fingerprint() -> None:
    config, tensors = eagle("eagle")
    head = head_of(config, tensors)
    other = head_of(config, tensors | {"fc.weight": tensors["fc.weight"] + 1})
    assert head.about.fingerprint != other.about.fingerprint
    assert replace(Weights(Path("a"), "eagle", config, tensors)).own == {"target_layers": LAYERS}
