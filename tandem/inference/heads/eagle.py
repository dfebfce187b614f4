"""EAGLE's heads: one decoder layer over hidden states of the target and the tokens after them.

EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858) read the target's last hidden state, EAGLE-3
(arXiv 2503.01840) three of its layers, fused, and has an output matrix of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.feed import Feed, listed
from tandem.inference.heads.head import Head, HeadCache, HeadSource, HeadWeights, features_of
from tandem.inference.heads.layer import HeadLayer, within
from tandem.inference.heads.parameters import HeadParameters
from tandem.inference.heads.pieces import PieceLayer, Pieces

# Names of the layer's tensors begin so.
_AT = "layers.0."
# Paths of a draft are at most as long as a request can ask for; so many depths are trained.
_DEPTHS, _LEARNT_DEPTHS = 64, 5


@dataclass(eq=False, slots=True)
class EagleCache(HeadCache):
    """A sequence's pairs of a feature and the token after it: true ones, then guessed ones.

    Attributes:
        guessed: [1 + branch rows, width] the head's own states of the trunk's end and of each
            branch row: guesses of the target's next feature.
    """

    guessed: Tensor | None = None


@dataclass(frozen=True)
class EagleWeights:
    """All that is learnt.

    Attributes:
        fuse: of token and state into one width (EAGLE), or of the states of several layers.
        fuse_bias: of it; None for none.
        layer: over pairs of a state and a token.
        norms: EAGLE-3's, of tokens, of states, and at the end; None for EAGLE.
        normed_residual: whether EAGLE-3's residual is taken after the norm.
    """

    fuse: Tensor
    fuse_bias: Tensor | None
    layer: HeadLayer | PieceLayer
    norms: Sequence[Callable[[Tensor], Tensor]] | None
    normed_residual: bool

    def fused(self, features: Tensor) -> Tensor:
        """[n, width] what the layer reads of features [n, layers * width]."""
        return features if self.norms is None else linear(features, self.fuse, self.fuse_bias)

    def forward(
        self, tokens: Tensor, states: Tensor, layer: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What the layer makes of pairs, and what the output matrix reads of it.

        Args:
            tokens: [..., width] their embeddings.
            states: [..., width] before them: fused ones, or guesses.
            layer: the layer, with all else that it takes.
        """
        if self.norms is None:
            pairs = torch.cat((tokens, states), -1)
            found = layer(linear(pairs, self.fuse, self.fuse_bias))
            return found, found
        of_tokens, of_states, at_end = self.norms
        normed = of_states(states)
        before = normed if self.normed_residual else states
        found = layer(before, read=torch.cat((of_tokens(tokens), normed), -1))
        return found, at_end(found)


class EagleHead(Head):
    """Guesses the target's next hidden state, and from it the next token.

    A feed that extends the trunk has a feature for each token: that of the position before it. One
    of branch rows has none: a row's feature is what the head guessed at its parent.
    """

    cache = EagleCache
    depths = _DEPTHS
    learnt_depths = _LEARNT_DEPTHS

    def __init__(self, source: HeadSource) -> None:
        files = source.files
        tensors = _named(files.tensors())
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
        self._ids = self._own_ids(placed.get("d2t"))
        self._fused = files.is_fused
        self.guesses_states = not files.is_fused
        self._norm_output = files.normed_output
        weights = self._formed(placed)
        self._serve(HeadWeights(0, weights))
        layer = weights.layer
        assert isinstance(layer, HeadLayer)
        hidden_size = int(files.config.get("target_hidden_size") or layer.width)
        self._describe(len(self._embedding), hidden_size)
        source.require_width(hidden_size)
        states = len(self.reads) * hidden_size
        expected = [layer.width, states if self._fused else states + layer.width]
        if list(weights.fuse.shape) != expected:
            raise ValueError(f"fc.weight is {list(weights.fuse.shape)} instead of {expected}")
        self._hold(source.room, layer.max_length)

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
        weights: EagleWeights = self._weights_of(feeds[0]).parts
        batch = PackedBatch.of(feeds, self.device)
        tokens = self._embedding.index_select(0, batch.token_ids[0])
        assert isinstance(weights.layer, HeadLayer)
        layer = partial(weights.layer, batch=batch, pool=self._pool)
        found, ends = weights.forward(tokens, self._states(feeds, weights), layer)
        self._keep(feeds, ends if self._norm_output else found)
        return self.logits(ends if batch.rows is None else ends.index_select(0, batch.rows), 1)

    def logits(self, read: Tensor, depth: int) -> Tensor:
        """See `Head`; tokens that it does not know have none."""
        logits = linear(read, self._output)
        if self._ids is None:
            return logits
        rows = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return rows.index_copy_(1, self._ids, logits)

    def _learns(self, name: str) -> bool:
        return name.startswith(("fc.", "midlayer.", _AT)) or name == "norm.weight"

    def _formed(self, tensors: Mapping[str, Tensor], like: HeadLayer | None = None) -> EagleWeights:
        """See `Head`; over pieces where the layer that they are like is given."""
        named = _named(tensors)
        own, norms = within(named, _AT), []
        if self._fused:
            norms = [own.pop(f"{name}.weight") for name in ("input_layernorm", "hidden_norm")]
            norms.append(named["norm.weight"])
        layer: HeadLayer | PieceLayer
        if like is None:
            layer = HeadLayer(self._source.files.layer_config, own, wide=self._fused)
        else:
            layer = like.over_pieces(own)
        return EagleWeights(
            named["fc.weight"],
            named.get("fc.bias"),
            layer,
            [layer.norm(weight) for weight in norms] or None,
            self._source.files.normed_residual,
        )

    def guesses(
        self, weights: HeadParameters, states: Tensor, paths: Tensor, piece: Tensor
    ) -> list[Tensor]:
        """See `Head`; behind the first depth it reads its own guesses."""
        parts = self._formed(weights.by_name, self._weights.parts.layer)
        pieces, tokens = Pieces(piece), embedding(paths, self._embedding)
        before, reads = pieces.padded(parts.fused(states.flatten(1))), []
        for token in tokens.unbind(1):
            found, ends = parts.forward(pieces.padded(token), before, parts.layer)
            before = ends if self._norm_output else found
            reads.append(pieces.flat(ends))
        return reads

    def _states(self, feeds: Sequence[Feed], weights: EagleWeights) -> Tensor:
        """[T, width] what the layer reads beside each token: features, and guesses of them."""
        told = [feed for feed in feeds if feed.features is not None]
        parts: dict[int, Tensor] = {}
        if told:
            features = weights.fused(features_of(told, self.device, self._dtype).flatten(1))
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


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names that EAGLE gives its layer, and EAGLE-3 does not."""
    return {name.replace("midlayer.", _AT): part for name, part in tensors.items()}
