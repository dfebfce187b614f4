"""EAGLE's heads: one decoder layer over hidden states of the target and the tokens after them.

EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858) read the target's last hidden state, EAGLE-3
(arXiv 2503.01840) three of its layers, fused, and has an output matrix of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.feed import Feed, listed
from tandem.inference.heads.head import Head, HeadCache, HeadSource, features_of
from tandem.inference.heads.layer import HeadLayer, within

# Names of the layer's tensors begin so.
_AT = "layers.0."
# Paths of a draft are at most as long as a request can ask for.
_DEPTHS = 64


@dataclass(eq=False, slots=True)
class EagleCache(HeadCache):
    """A sequence's pairs of a feature and the token after it: true ones, then guessed ones.

    Attributes:
        guessed: [1 + branch rows, width] the head's own states of the trunk's end and of each
            branch row: guesses of the target's next feature.
    """

    guessed: Tensor | None = None


class EagleHead(Head):
    """Guesses the target's next hidden state, and from it the next token.

    A feed that extends the trunk has a feature for each token: that of the position before it. One
    of branch rows has none: a row's feature is what the head guessed at its parent.
    """

    cache = EagleCache
    depths = _DEPTHS

    def __init__(self, source: HeadSource) -> None:
        files = source.files
        tensors = {name.replace("midlayer.", _AT): part for name, part in files.tensors().items()}
        read = {"embed_tokens.weight", "lm_head.weight", "fc.weight", "fc.bias", "d2t"}
        read |= {"norm.weight"} if files.is_fused else set()
        rest = [name for name in tensors if name not in read and not name.startswith(_AT)]
        files.require_all_read(rest)
        tensors = {name: part for name, part in tensors.items() if name not in rest}
        if "embed_tokens.weight" not in tensors:
            tensors["embed_tokens.weight"] = source.embedding()
        if "lm_head.weight" not in tensors:
            if "d2t" in tensors:
                raise ValueError("a vocabulary of its own needs an lm_head.weight of its own")
            tensors["lm_head.weight"] = source.output()
        super().__init__(source, tensors)
        placed = source.placed(tensors)
        self._embedding, self._output = placed["embed_tokens.weight"], placed["lm_head.weight"]
        self._fuse, self._fuse_bias = placed["fc.weight"], placed.get("fc.bias")
        self._ids = self._own_ids(placed.get("d2t"))
        fused = self._fused = files.is_fused
        own = within(placed, _AT)
        norms = [own.pop(f"{n}.weight") for n in ("input_layernorm", "hidden_norm") if fused]
        self._layer = HeadLayer(files.layer_config, own, wide=fused)
        if fused:
            norms.append(placed["norm.weight"])
            self._token_norm, self._state_norm, self._end_norm = map(self._layer.norm, norms)
        self._normed_residual, self._norm_output = files.normed_residual, files.normed_output
        width = self._layer.width
        hidden_size = int(files.config.get("target_hidden_size") or width)
        self._describe(len(self._embedding), hidden_size)
        source.require_width(hidden_size)
        states = len(self.reads) * hidden_size
        expected = [width, states if fused else states + width]
        if list(self._fuse.shape) != expected:
            raise ValueError(f"fc.weight is {list(self._fuse.shape)} instead of {expected}")
        self._hold(source.room, self._layer.max_length)

    def _own_ids(self, offsets: Tensor | None) -> Tensor | None:
        """[rows] the target's ids of a head with a vocabulary of its own; None for the target's."""
        rows, vocab_size = len(self._output), len(self._embedding)
        if rows == vocab_size:
            return None
        if offsets is None:
            raise ValueError(
                f"{rows} rows of lm_head.weight, {vocab_size} of the embedding, and no d2t"
                " that says which tokens they are"
            )
        ids = torch.arange(rows, device=self.device) + offsets.long()
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ValueError(f"d2t names tokens beyond the target's {vocab_size}")
        return ids

    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        assert self._pool is not None
        batch = PackedBatch.of(feeds, self.device)
        tokens = self._embedding.index_select(0, batch.token_ids[0])
        states = self._states(feeds)
        if self._fused:
            normed = self._state_norm(states)
            read = torch.cat((self._token_norm(tokens), normed), -1)
            before = normed if self._normed_residual else states
            found = self._layer(before, batch, self._pool, read)
            ends = self._end_norm(found)
        else:
            fused = linear(torch.cat((tokens, states), -1), self._fuse, self._fuse_bias)
            found = ends = self._layer(fused, batch, self._pool)
        self._keep(feeds, ends if self._norm_output else found)
        wanted = ends if batch.rows is None else ends.index_select(0, batch.rows)
        logits = linear(wanted, self._output)
        if self._ids is None:
            return logits
        rows = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return rows.index_copy_(1, self._ids, logits)

    def _states(self, feeds: Sequence[Feed]) -> Tensor:
        """[T, width] what the layer reads beside each token: features, and guesses of them."""
        told = [feed for feed in feeds if feed.features is not None]
        parts: dict[int, Tensor] = {}
        if told:
            features = features_of(told, self.device, self._dtype).flatten(1)
            if self._fused:
                features = linear(features, self._fuse, self._fuse_bias)
            counts = [len(feed.token_ids) for feed in told]
            parts |= {
                id(f): part for f, part in zip(told, torch.split(features, counts), strict=True)
            }
        for feed in feeds:
            if feed.features is None:
                cache = feed.cache
                assert isinstance(cache, EagleCache)
                assert cache.guessed is not None
                assert feed.parents
                behind = torch.tensor(feed.parents).to(self.device, non_blocking=True)
                parts[id(feed)] = cache.guessed.index_select(0, behind)
        states = [parts[id(feed)] for feed in feeds]
        return states[0] if len(states) == 1 else torch.cat(states)

    def _keep(self, feeds: Sequence[Feed], found: Tensor) -> None:
        """Grow the feeds' caches, and remember what was guessed after their tokens."""
        first = 0
        for feed in feeds:
            cache, end = feed.cache, first + len(feed.token_ids)
            assert isinstance(cache, EagleCache)
            if feed.parents:
                assert cache.guessed is not None
                cache.guessed = torch.cat((cache.guessed, found[first:end]))
            else:
                cache.guessed = found[end - 1 : end]
            cache.grow(listed(feed.token_ids), feed.parents)
            first = end
