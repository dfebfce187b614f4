"""The pass of any model of `transformers`, through its own modules.

Models call the function that is registered under their attention implementation's name. We
register one that attends to the packed batch.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tandem.errors import Unsupported
from tandem.inference.batch.attention import attend
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.hidden_states import Layers, Tap, blocks_of
from tandem.inference.kv.pool import KVPool
from tandem.inference.output import PassOutput

_names = itertools.count()


class ModulePass(nn.Module):
    """A model with its attention replaced.

    Args:
        model: its attention implementation is set.
        of_layers: whose hidden states it can give.

    Attributes:
        blocks: its layers; none if they are not found.
    """

    def __init__(self, model: PreTrainedModel, of_layers: Layers = ()) -> None:
        super().__init__()
        self._tap = Tap(model, of_layers) if of_layers else None
        self.blocks = blocks_of(model)
        # The first pass checks that no layer needs more than `attend` does.
        self._checked = False
        self._model = model
        self._batch: PackedBatch | None = None
        # Each model registers under its own name, so that it reads its own batch.
        name = f"tandem_{next(_names)}"
        AttentionInterface.register(name, self._attend)
        model.set_attn_implementation(name)

    def forward(self, batch: PackedBatch, pool: KVPool) -> PassOutput:
        """The rows that the batch asks for; keys and values go to the pool."""
        self._batch = batch
        pool.slots = batch.slots
        logits: Tensor = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            past_key_values=pool,
            use_cache=True,
            logits_to_keep=0 if batch.rows is None else batch.rows,
        ).logits[0]
        self._checked = True
        return PassOutput(logits, None if self._tap is None else self._tap.take(batch.states))

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Called by each layer.

        Args:
            module: the layer's attention.
            query: [1, Hq, T, D] of the batch.
            key: [H, positions, D], the pool's.
            value: [H, positions, Dv], the pool's.
            attention_mask: ignored: the batch knows which tokens see which.
            scaling: see `attend`.
            sliding_window: see `attend`.
            softcap: see `attend`.

        Returns:
            [1, T, Hq, Dv], and no attention weights.
        """
        if not self._checked:
            refuse_what_is_unknown(module, sliding_window, kwargs)
        assert self._batch is not None
        seen = attend(
            batch=self._batch,
            query=query[0],
            keys=key,
            values=value,
            scaling=scaling,
            window=sliding_window,
            softcap=softcap,
        )
        return seen[None], None


def refuse_what_is_unknown(
    module: nn.Module, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    """Refuse a model that needs more than this attention does: sinks, biases, its own masks.

    Raises:
        Unsupported: the model needs such a feature.
    """
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None
    kind = getattr(module, "layer_type", None)  # a part's layers are numbered from 0
    if kind is None and kinds and layer is not None and layer < len(kinds):
        kind = kinds[layer]
    if kind is not None:
        slides = kind == "sliding_attention"
    elif not getattr(config, "use_sliding_window", True):
        slides = False
    if slides and sliding_window is None:
        # Such a window is mostly wider than the probe, so the probe would not notice.
        raise Unsupported("a sliding window that is only in its mask")
    for name in ("s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise Unsupported(f"attention with {name!r}")
