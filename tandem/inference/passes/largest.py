"""What the largest passes of a device take, beside weights and the KV pool."""

from __future__ import annotations

from typing import NamedTuple

import structlog
import torch

from tandem.errors import StartupError
from tandem.inference.check.texts import ordinary_tokens
from tandem.inference.feed import Feed
from tandem.inference.kv import size
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import Backend
from tandem.speculation.distribution import process
from tandem.speculation.request.sampling import Sampling

_log = structlog.get_logger(__name__)

# What torch's operators make of rows where no kernel draws: copies, and an order by probability.
_SHAPED = Sampling(temperature=0.7, top_p=0.9, min_p=0.01)


class LargestPass(NamedTuple):
    """Sizes of the largest pass that a service makes.

    Attributes:
        rows: new tokens; 0 where it is not to be measured.
        wanted: of these, with rows of logits.
        captured: new tokens of the largest captured pass, all with rows of logits; 0 for none.
    """

    rows: int = 0
    wanted: int = 0
    captured: int = 0


NOT_MEASURED = LargestPass()


def memory_of_passes(
    backend: Backend, largest: LargestPass, longest: int, share: float = 1.0
) -> int:
    """Bytes that a service's passes take beside weights and pool, measured.

    A probe's pool, of what the longest text takes but at most half of the memory that is
    left, stands in for the real one: a pass may take more after a long text. Its keys are zeros,
    since only sizes matter.

    Args:
        backend: on a CUDA device.
        largest: what is measured.
        longest: positions of the longest text.
        share: see `Room`.

    Raises:
        StartupError: the device has no room for such a pass.
    """
    device, each = backend.device, backend.pool.bytes_per_position
    rows, captured = (min(count, longest) for count in (largest.rows, largest.captured))
    fits = size.memory_left(device, share) // 2 // each
    held = max(rows, captured, min(longest, fits))
    try:
        probe = backend.beside(held)
        for states in (*probe.pool.keys, *probe.pool.values):
            states.zero_()

        def computed(rows: int, wanted: int) -> PassOutput:
            """A pass at the end of a text that fills the pool."""
            cache = probe.pool.reserve(held)
            cache.length = held - rows
            tokens = ordinary_tokens(probe.vocab_size, rows)
            states = rows if probe.of_layers else 0
            output = probe.forward([Feed(cache, tokens, wanted, states=states)])
            probe.pool.release(cache)
            return output

        wanted = min(largest.wanted, rows)
        taken = size.memory_during(
            device, lambda: process(computed(rows, wanted).logits, [_SHAPED])
        )
        if captured:  # their results and what is between them stay
            taken += 2 * size.memory_during(device, lambda: computed(captured, captured))
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"{device} has no room for a pass of {max(rows, captured)} tokens beside the weights;"
            " lower TOKEN_BUDGET, PREFILL_CHUNK or GRAPH_ROWS"
        ) from error
    _log.info("largest passes", bytes=taken, rows=rows, captured=captured, behind=held - rows)
    return taken
