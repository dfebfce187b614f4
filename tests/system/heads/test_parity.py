"""Heads in the layouts that are published compute what vLLM's own classes compute for them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.inference.feed import Feed
from tandem.inference.heads.head import Head
from tandem.inference.heads.load import load_head
from tandem.inference.kv.size import Room
from tandem.inference.loading.checkpoint import CheckpointSource
from tests.support.models.heads import (
    eagle_config,
    random_eagle,
    random_eagle_3,
    random_medusa,
)
from tests.support.repository import ROOT

pytestmark = pytest.mark.campaign(
    "heads in their published layouts compute what vLLM's classes compute",
    "unit/inference/heads: rows equal the paper's formula and the layers of transformers",
)

VLLM = ROOT / ".cache" / "peers" / "vllm" / "env" / "bin" / "python"
WIDTH, VOCAB_SIZE, LAYERS = 64, 32, 8
OWN_IDS = tuple(range(0, VOCAB_SIZE, 2))
SECONDS = 600
Array = npt.NDArray[np.float32]


def target_in(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def layout(name: str) -> tuple[str, str, dict[str, Any], dict[str, Tensor]]:
    """Family, vLLM's method, configuration and weights, as their authors publish them."""
    torch.manual_seed(1)
    config = eagle_config(WIDTH, VOCAB_SIZE) | {"head_dim": WIDTH // 2, "rms_norm_eps": 1e-5}
    if name == "medusa":
        keys = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
        keys |= {"medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": WIDTH}
        keys |= {"vocab_size": VOCAB_SIZE, "truncated_vocab_size": VOCAB_SIZE}
        return "medusa", "medusa", keys, random_medusa(WIDTH, VOCAB_SIZE)
    if name == "eagle":
        keys = {"architectures": ["LlamaForCausalLM"]}
        return "eagle", "eagle", config | keys, _smaller(random_eagle(WIDTH))
    kind = "qwen3" if "qwen3" in name else "llama"
    tensors = _smaller(random_eagle_3(WIDTH, VOCAB_SIZE, OWN_IDS, head_norms=kind == "qwen3"))
    if name == "speculators eagle3":
        layer = LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}).to_dict()
        return "eagle", "eagle3", {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "draft_vocab_size": len(OWN_IDS),
            "norm_before_residual": True,
            "target_hidden_size": None,
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
            },
        }, tensors  # fmt: skip
    architecture = "LlamaForCausalLMEagle3" if kind == "llama" else "Eagle3Qwen3ForCausalLM"
    tensors = {n.replace("layers.0.", "midlayer."): part for n, part in tensors.items()}
    keys = {"architectures": [architecture], "draft_vocab_size": len(OWN_IDS), "model_type": kind}
    return "eagle", "eagle3", config | keys, tensors


def _smaller(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a width at which the rows stay in bounds."""
    return {
        name: part * 0.3 if part.dim() == 2 and part.is_floating_point() else part
        for name, part in tensors.items()
    }


class Calls:
    """What vLLM computed, call by call."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as found:
            self.text: list[int] = found["text"].astype(int).tolist()
            parts: dict[str, list[Array]] = {}
            for name in sorted(set(found.files) - {"text"}):
                parts.setdefault(name.rpartition(".")[0], []).append(found[name])
        self.calls = [(name.partition(".")[2], own) for name, own in parts.items()]

    def drafts(self) -> Iterator[tuple[list[tuple[str, list[Array]]], int]]:
        """Of each draft its calls, and how many of the first call's rows count: the pass after a
        verdict has rows of tokens that were not kept."""
        draft: list[tuple[str, list[Array]]] = []
        for kind, own in [*self.calls, ("end", [])]:
            begins = kind in ("combine", "end") or (
                kind == "forward"
                and len(own[0]) > 1
                and draft[-1:] != []
                and draft[-1][0] == "logits"
            )
            if begins and draft:
                yield draft, _counting(draft)
                draft = []
            draft.append((kind, own))


def _counting(draft: list[tuple[str, list[Array]]]) -> int:
    first = next(own for kind, own in draft if kind == "forward")
    logits = next(own for kind, own in draft if kind == "logits")
    rows = [i for i, row in enumerate(first[-2]) if np.allclose(row, logits[0][0], atol=1e-6)]
    return rows[0] + 1 if rows else 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_in(tmp_path_factory.mktemp("pair") / "target")


def computed(name: str, target: Path, folder: Path) -> tuple[Head, Calls]:
    """The head as we load it, and what vLLM made of it."""
    if not VLLM.is_file():
        pytest.skip("vLLM is not installed: `make bench-peers` installs it into .cache/peers")
    family, method, config, tensors = layout(name)
    head = folder / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    save_file({n: part.contiguous() for n, part in tensors.items()}, head / "model.safetensors")
    out = folder / "calls.npz"
    script = ROOT / "tests" / "support" / "models" / "vllm_heads.py"
    run = subprocess.run(
        [str(VLLM), str(script), str(target), str(head), method, str(out)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env=os.environ | {"VLLM_CACHE_ROOT": str(folder / "cache")},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    loaded = load_head(
        CheckpointSource(str(head), "cpu", "float32"), family, str(target), Room(64, 64)
    )
    return loaded, Calls(out)


@pytest.mark.parametrize("name", ["eagle", "eagle3 llama", "eagle3 qwen3", "speculators eagle3"])
@torch.inference_mode()
def test_eagle(name: str, target: Path, tmp_path: Path) -> None:
    """Every draft of a text: true pairs, then three steps of a rollout."""
    head, calls = computed(name, target, tmp_path)
    cache = head.reserve(48)
    assert cache is not None
    compared = 0
    for draft, count in calls.drafts():
        told = next(own for kind, own in draft if kind == "forward")
        features = next((own for kind, own in draft if kind == "combine"), [told[2]])[0]
        rows = iter([own[-1][0] for kind, own in draft if kind == "logits"])
        if not count:
            break
        position = int(told[1][0])
        cache.rollback(position)
        states = features[:count].reshape(count, len(head.reads), WIDTH)
        tokens = told[0][:count].astype(int).tolist()
        found = head.forward([Feed(cache, tokens, 1, features=[states])]).logits[0]
        following = [own for kind, own in draft if kind == "forward"][1:]
        for step, row in enumerate(rows):
            finite = np.isfinite(row)
            assert np.array_equal(finite, found.isfinite().numpy())
            error = np.abs(found.numpy()[finite] - row[finite]).max()
            assert error < 1e-3 * max(1.0, np.abs(row[finite]).max()), (name, step, error)
            compared += 1
            if step < len(following):
                token = int(following[step][0][0])
                feed = Feed(cache, [token], 1, [step])
                found = head.forward([feed]).logits[0]
    assert compared >= 9


@torch.inference_mode()
def test_medusa(target: Path, tmp_path: Path) -> None:
    head, calls = computed("medusa", target, tmp_path)
    compared = 0
    pairs = zip(calls.calls, calls.calls[1:], strict=False)
    for (kind, given), (after, logits) in pairs:
        if (kind, after) != ("forward", "logits"):
            continue
        states, rows = given[0], logits[len(logits) // 2 :]
        for i, state in enumerate(states):
            nothing: Any = ()
            feed = Feed(nothing, [0], head.depths, features=[state.reshape(1, 1, WIDTH)])
            found = head.forward([feed]).logits.numpy()
            assert np.abs(found - np.stack([row[i] for row in rows])).max() < 1e-3
            compared += 1
    assert compared >= 3
