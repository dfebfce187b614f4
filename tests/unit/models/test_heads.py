"""What trains a head computes what serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import llama
from models.zoo.heads.eagle import FUSED, SHAPE, EagleLayer
from models.zoo.heads.hydra import PREFIX, HydraHeads
from models.zoo.heads.medusa import HEADS, LAYERS, MedusaBlocks
from models.zoo.heads.mtp import LAYER, MtpLayers
from tandem.inference.feed import Feed
from tandem.inference.heads.eagle import EagleHead
from tandem.inference.heads.hydra import HydraHead
from tandem.inference.heads.medusa import MedusaHead
from tandem.inference.kv.size import Room
from tests.support.models.heads import Weights, source_of

WIDTH = llama.TARGET.hidden_size
OWN = {"tandem": {"target_layers": 5}}


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def as_sent(states: Tensor) -> Any:
    return states.to(torch.bfloat16).view(torch.int16).numpy()


@torch.inference_mode()
def test_medusa() -> None:
    torch.manual_seed(0)
    model = MedusaBlocks(WIDTH)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    table, state = torch.randn(9, WIDTH), torch.randn(1, WIDTH).to(torch.bfloat16).float()
    files = Weights(Path("m"), "medusa", OWN, weights_of(model) | {"lm_head.weight": table})
    head = MedusaHead(source_of(files, Room(0, 0)))
    cache: Any = ()
    feed = Feed(cache, [0], HEADS, features=[as_sent(state[None])])
    wanted = F.linear(torch.stack(model(state[None], state[None], HEADS))[:, 0, 0], table)
    torch.testing.assert_close(head.forward([feed]).logits, wanted, atol=1e-4, rtol=1e-4)
    assert len(model.blocks) == HEADS
    assert LAYERS == 3


@torch.inference_mode()
def test_mtp() -> None:
    """After a run that grows."""
    torch.manual_seed(0)
    model = MtpLayers()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    table, time = torch.randn(9, WIDTH), 6
    features = torch.randn(1, time, WIDTH).to(torch.bfloat16).float()
    config = {"layer_config": LAYER.to_dict(), **OWN}
    weights = weights_of(model) | {"lm_head.weight": table}
    head = MedusaHead(source_of(Weights(Path("m"), "medusa", config, weights), Room(64, 64)))
    cache = head.reserve(16)
    assert cache is not None
    found = F.linear(torch.stack(model(features, features, HEADS))[:, 0], table)
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        cache.rollback(begin)
        told = as_sent(features[0, begin:end, None])
        feed = Feed(cache, [0] * (end - begin), HEADS, features=[told])
        rows = head.forward([feed]).logits
        torch.testing.assert_close(rows, found[:, end - 1], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("plus", [False, True])
@torch.inference_mode()
def test_hydra(plus: bool) -> None:
    """After the emitted token, and along a path."""
    model = HydraHeads(plus)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    table, time = torch.randn(9, WIDTH), 5
    tokens = torch.tensor([1, 5, 2, 8, 3, 0])
    features = torch.randn(1, time, WIDTH).to(torch.bfloat16).float()
    found = model(F.embedding(tokens, table)[None], features, 3)
    weights = weights_of(model) | {"embed_tokens.weight": table}
    weights |= {f"hydra_lm_head.{k}.weight": table for k in range(len(found))}
    files = Weights(Path("h"), "hydra", {"prefix_config": PREFIX.to_dict(), **OWN}, weights)
    head = HydraHead(source_of(files, Room(64, 64)))
    for root in range(time - len(found) + 1):
        cache = head.reserve(16)
        assert cache is not None
        for k, states in enumerate(found):
            at = root + 1 + k
            if k:
                feed = Feed(cache, [int(tokens[at])], 1, [k - 1])
            else:
                told = as_sent(features[0, : root + 1, None])
                feed = Feed(cache, tokens[1 : root + 2].tolist(), 1, features=[told])
            wanted = F.linear(states[0, root], table)
            torch.testing.assert_close(head.forward([feed]).logits[0], wanted, atol=2e-4, rtol=1e-3)
        head.release(cache)


@pytest.mark.parametrize("fused", [False, True])
@torch.inference_mode()
def test_eagle(fused: bool) -> None:
    """Guesses after true pairs, and after guesses."""
    read = len(FUSED) if fused else 1
    model = EagleLayer(fused)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    table, time, steps = torch.randn(9, WIDTH), 7, 3
    tokens = torch.tensor([1, 5, 2, 8, 3, 0, 4, 7])
    features = torch.randn(1, time, read * WIDTH).to(torch.bfloat16).float()
    found = model(F.embedding(tokens, table)[None], features, steps)
    weights = weights_of(model) | {"embed_tokens.weight": table, "lm_head.weight": table}
    config = SHAPE.to_dict() | OWN | {"eagle_aux_hidden_state_layer_ids": FUSED}
    files = Weights(Path("e"), "eagle", config, weights)
    head = EagleHead(source_of(files, Room(64, 64)))
    for root in range(time - steps + 1):
        cache = head.reserve(16)
        assert cache is not None
        for step in range(steps):
            at = root + step + 1
            if step:
                feed = Feed(cache, [int(tokens[at])], 1, [step - 1])
            else:
                told = as_sent(features[0, :at].view(at, read, WIDTH))
                feed = Feed(cache, tokens[1 : at + 1].tolist(), 1, features=[told])
            wanted = F.linear(found[step][0, root], table)
            torch.testing.assert_close(head.forward([feed]).logits[0], wanted, atol=2e-4, rtol=1e-3)
        head.release(cache)
