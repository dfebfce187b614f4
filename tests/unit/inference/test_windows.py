"""A small decoder that holds the first and the latest keys of a text alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.views.window import WindowedDecoder
from tests.support.decoders import decoder_over

SHAPE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.4,
}
TEXT = [(5 * n * n + n) % 24 for n in range(1000)]


@pytest.fixture(scope="module", params=["torch", "openvino"])
def near(request: pytest.FixtureRequest) -> Decoder:
    """A decoder whose layers see eight keys."""
    torch.manual_seed(4)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    return decoder_over(model, "near", cache_tokens=4096, engine=request.param)


@torch.inference_mode()
def test_what_is_not_seen_is_not_missed(near: Decoder) -> None:
    """Prompts in pieces, tokens one by one, rows that are taken back: the rows are those of all
    keys, at their own positions."""
    windowed = WindowedDecoder(near, SparseKeys("window", budget=150, sink=0))
    cache, whole = windowed.reserve(2000), near.reserve(2000)
    assert cache is not None
    assert whole is not None
    assert cache.capacity < 500
    at = 0
    for count in (600, 1, 1, 5, 90, 1, 200, 3, 64):
        piece = TEXT[at : at + count]
        rows = min(count, 3)
        found = windowed.forward([Feed(cache, piece, rows)]).logits
        expected = near.forward([Feed(whole, piece, rows)]).logits
        assert torch.allclose(found, expected, atol=1e-4)
        at += count - count // 2 % 60
        for one in (cache, whole):
            one.rollback(at)
        assert cache.length + cache.skipped == whole.length == at
    assert cache.skipped > 200
    windowed.release(cache)
    near.release(whole)
    assert near.free_positions == near.positions


@torch.inference_mode()
def test_the_first_keys_stay() -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    decoder = decoder_over(model, "all", cache_tokens=2048, engine="torch")
    windowed = WindowedDecoder(decoder, SparseKeys("window", budget=160, sink=4))
    cache = windowed.reserve(2000)
    assert cache is not None
    windowed.forward([Feed(cache, TEXT[:100], 0)])
    keys: Any = decoder.pool.keys[0]
    first = keys[:, cache.start : cache.start + 4].clone()
    windowed.forward([Feed(cache, TEXT[100:900], 1)])
    assert keys[:, cache.start : cache.start + 4].equal(first)
    assert cache.length + cache.skipped == 900
    with pytest.raises(ValueError, match="keys from 20 on were left out"):
        cache.rollback(20)
    windowed.release(cache)


def test_a_window_shares_no_prefix(near: Decoder) -> None:
    windowed = WindowedDecoder(near, SparseKeys("window", budget=160, sink=4))
    cache = windowed.reserve(2000)
    assert cache is not None
    assert cache.adopt(TEXT, "salt") == 0
    with torch.inference_mode():
        windowed.forward([Feed(cache, TEXT, 0)])
    cache.publish(TEXT, len(TEXT))
    assert not cache.blocks
    windowed.release(cache)


@torch.inference_mode()
def test_rows_are_those_of_attention_to_the_first_and_the_latest_keys() -> None:
    """Of one layer, whose keys hang on their own tokens alone; by a mask over the whole text."""
    torch.manual_seed(6)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | {"num_hidden_layers": 1}))).eval()
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    decoder = decoder_over(model, "one", cache_tokens=2048, engine="torch")
    windowed = WindowedDecoder(decoder, SparseKeys("window", budget=150, sink=10))
    cache = windowed.reserve(2000)
    assert cache is not None
    for first, last in ((0, 256), (256, 500), (500, 700), (700, 703)):
        row = windowed.forward([Feed(cache, TEXT[first:last], 1)]).logits
    assert cache.skipped > 200
    seen = torch.ones(last, dtype=torch.bool)
    seen[10 : 10 + cache.skipped] = False
    mask = torch.where(seen, 0.0, -torch.inf)[None, None, None]
    position = torch.tensor([[last - 1]])
    inner: Any = plain.model
    layer = inner.layers[0].self_attn
    states = inner.layers[0].input_layernorm(inner.embed_tokens(torch.tensor([TEXT[:last]])))
    cos, sin = inner.rotary_emb(states, torch.arange(last)[None])
    heads = (1, last, -1, 4)
    query, key, value = (
        part(states).view(heads).transpose(1, 2)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    out = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, -1:], key, value, mask, enable_gqa=True
    )
    x = inner.embed_tokens(torch.tensor([[TEXT[last - 1]]]))
    x = x + layer.o_proj(out.transpose(1, 2).reshape(1, 1, -1))
    x = x + inner.layers[0].mlp(inner.layers[0].post_attention_layernorm(x))
    expected = plain.lm_head(inner.norm(x))[0]
    assert position.item() == cache.length + cache.skipped - 1
    assert torch.allclose(row, expected, atol=1e-4)
