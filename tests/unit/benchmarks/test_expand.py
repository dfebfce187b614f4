"""An expanded checkpoint gives its source's logits, though its added weights are not zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.expand import Shape, expand

# More than a handful of positions, so that RoPE has angles to get wrong.
TOKENS = torch.arange(1, 97).reshape(2, 48) * 7 % 2048


@torch.inference_mode()
def logits_of(folder: Path, tokens: Tensor = TOKENS) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: Tensor = model(tokens).logits
    return logits


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("target", Shape(layers=7, width=448, heads=7, kv_heads=7, mlp=1088)),
        ("target", Shape(layers=5, width=384, heads=12, kv_heads=6, mlp=960)),
        ("drafter", Shape(layers=3, width=256, heads=8, kv_heads=8, mlp=512)),
    ],
)
def test_logits_are_equal(
    embedded_pair: tuple[Path, Path], tmp_path: Path, name: str, shape: Shape
) -> None:
    source = dict(zip(("drafter", "target"), embedded_pair, strict=True))[name]
    parameters = expand(source, shape, tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), logits_of(source), atol=1e-4, rtol=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == parameters
    assert model.config.num_hidden_layers == shape.layers
    text = "def main():\n    return 1\n"
    ours, theirs = (AutoTokenizer.from_pretrained(f) for f in (tmp_path, source))
    assert ours(text).input_ids == theirs(text).input_ids


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_grouped_heads_keep_their_keys(tmp_path: Path, kv_heads: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    expand(tmp_path / "source", Shape(3, 24, 8, kv_heads, 32), tmp_path / "out")
    tokens = TOKENS % 11
    found, expected = (logits_of(tmp_path / name, tokens) for name in ("out", "source"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_what_is_added_is_dense(embedded_pair: tuple[Path, Path], tmp_path: Path) -> None:
    expand(embedded_pair[0], Shape(3, 256, 8, 8, 512), tmp_path)
    layer = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[2]
    for projection in (layer.self_attn.q_proj, layer.mlp.up_proj):
        assert (projection.weight != 0).float().mean() > 0.99
    assert not layer.self_attn.o_proj.weight.any()
    assert not layer.mlp.down_proj.weight.any()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(1, 256, 8, 8, 512), "layers 1 is smaller"),
        (Shape(3, 256, 8, 3, 512), "3 kv heads do not divide"),
        (Shape(3, 256, 7, 7, 512), "7 heads do not divide"),
        (Shape(3, 256, 8, 4, 512), "need 5 kv heads"),
    ],
)
def test_a_shape_that_cannot_hold_the_source_is_refused(
    embedded_pair: tuple[Path, Path], tmp_path: Path, shape: Shape, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        expand(embedded_pair[0], shape, tmp_path)
