"""Groups of rows that hang at places of a text, as probes do: what look-ahead methods train.

A group is a chain after its place: each row sees the text up to the place, the rows of its own
group before it, and itself. Rows of several groups never see each other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models import llama
from models.loop import Stage

HEADS = llama.TARGET.num_attention_heads
SIZE = llama.TARGET.hidden_size // HEADS


def anchors_of(stage: Stage, tokens: Tensor, count: int, longest: int, first: int = 0) -> Tensor:
    """Places of a text at which groups hang [count], ascending: a function of the batch alone.

    Args:
        stage: says how long texts are.
        tokens: the batch.
        count: number of places, one in each of as many parts of a text.
        longest: rows of a group, which end within the text.
        first: the first place that may be taken.
    """
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    room = stage.length - 1 - longest - first
    starts = torch.arange(count) * room // count
    sizes = torch.cat([starts[1:], torch.tensor([room])]) - starts
    within = (torch.rand(count, generator=generator) * sizes).long()
    return first + starts + within


def states_of(
    half: llama.Half, text: Tensor, groups: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """What the head reads for the tokens of texts, and for the rows of their groups.

    Args:
        half: the weights.
        text: embeddings [batch, time, width].
        groups: embeddings [batch, places, rows, width].
        anchors: place of each group [places].

    Returns:
        States [batch, time, width] and [batch, places, rows, width].
    """
    batch, time, width = text.shape
    places, rows = groups.shape[1:3]
    positions = anchors[:, None] + 1 + torch.arange(rows)
    hidden = torch.arange(time) > anchors[:, None]
    hidden = hidden[:, None].expand(places, rows, time).reshape(1, places * rows, time)
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    cos, sin = llama.angles(time + rows, SIZE)
    cos, sin = cos[positions.flatten()], sin[positions.flatten()]

    hung = groups.reshape(batch, places * rows, width)
    for layer in half.layers:
        own = F.linear(llama.norm(hung, layer["first"]), layer["qkv"])
        seen = llama.norm(text, layer["first"])
        fused = F.linear(seen, layer["qkv"]).view(batch, time, 3, HEADS, SIZE)
        text_cos, text_sin = llama.angles(time, SIZE)
        q, k, v = fused.unbind(2)
        q, k = (llama.rotate(part, text_cos, text_sin) for part in (q * SIZE**-0.5, k))
        q, k, v = (part.transpose(1, 2).reshape(-1, time, SIZE) for part in (q, k, v))
        past = torch.ones(time, time, dtype=torch.bool).tril()
        score = torch.bmm(q, k.transpose(1, 2)).float().masked_fill(~past, -torch.inf)
        mixed = torch.bmm(score.softmax(-1).to(v.dtype), v)
        text = text + F.linear(_joined(mixed, batch), layer["out"])
        text = llama.feed_forward(text, layer)

        own_q, own_k, own_v = own.view(batch, places * rows, 3, HEADS, SIZE).unbind(2)
        own_q = llama.rotate(own_q * SIZE**-0.5, cos, sin)
        own_k = llama.rotate(own_k, cos, sin)
        own_q, own_k, own_v = (
            part.transpose(1, 2).reshape(-1, places * rows, SIZE) for part in (own_q, own_k, own_v)
        )
        behind = torch.bmm(own_q, k.transpose(1, 2)).float().masked_fill(hidden, -torch.inf)
        inner_q, inner_k, inner_v = (part.reshape(-1, rows, SIZE) for part in (own_q, own_k, own_v))
        inner = torch.bmm(inner_q, inner_k.transpose(1, 2)).float()
        inner = inner.masked_fill(later, -torch.inf).view(-1, places * rows, rows)
        share = torch.cat([behind, inner], -1).softmax(-1).to(v.dtype)
        found = torch.bmm(share[..., :time], v)
        close = torch.bmm(share[..., time:].reshape(-1, rows, rows), inner_v)
        mixed = found + close.view(found.shape)
        hung = hung + F.linear(_joined(mixed, batch), layer["out"])
        hung = llama.feed_forward(hung, layer)
    return llama.norm(text, half.norm), llama.norm(hung, half.norm).view(groups.shape)


def _joined(mixed: Tensor, batch: int) -> Tensor:
    """Heads' results [batch * heads, time, size] beside each other [batch, time, width]."""
    time = mixed.shape[1]
    return mixed.view(batch, HEADS, time, SIZE).transpose(1, 2).reshape(batch, time, HEADS * SIZE)


def following(rows: Tensor, anchors: Tensor, count: int) -> Tensor:
    """What stands at the `count` places after each anchor [batch, places, count, ...].

    Args:
        rows: of a text's places [batch, time, ...].
        anchors: [places].
        count: rows of a group: row j is compared with place anchor + 1 + j.
    """
    return rows[:, anchors[:, None] + 1 + torch.arange(count)]
