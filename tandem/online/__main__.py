"""python -m tandem.online ORDER: the trainer, a process of its own that a drafter starts.

It ends when its standard input does, and so with its drafter, however that ended. What it has to
say are lines of JSON on its standard output: {"ready": true}, {"problem": sentence}, and
{"measured": {...}, "fault": sentence, "offer": file}, where new weights are offered.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.online.budget import Budget, yield_to_all
from tandem.online.order import Order

if TYPE_CHECKING:
    from tandem.online.learner import WeightsInTraining

# How long a trainer without enough texts waits before it looks again.
_IDLE_SECONDS = 1.0
# Of a head's KV cache here: its passes serve nobody.
_POSITIONS = 128


def main() -> None:
    """Train until the drafter is gone."""
    threading.Thread(target=_end_with_the_drafter, daemon=True).start()
    yield_to_all()
    # What libraries print is not said to the drafter.
    said = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(what: dict[str, Any]) -> None:
        said.write(json.dumps(what) + "\n")
        said.flush()

    order = Order(**json.loads(sys.argv[1]))
    rest = Budget(order.seconds).wait

    def idle() -> None:
        time.sleep(_IDLE_SECONDS)
        rest()

    try:
        train(order, tell, rest, idle)
    except Exception as error:
        tell({"problem": f"{type(error).__name__}: {error}"})
        raise


def train(
    order: Order,
    tell: Callable[[dict[str, Any]], None],
    rest: Callable[[], None],
    idle: Callable[[], None],
) -> None:
    """Train for ever; see `OnlineTraining`."""
    import torch

    from tandem.online.replay import Replay
    from tandem.online.training import OnlineTraining

    torch.set_num_threads(1)
    learner = (head_learner if order.head else decoder_learner)(order, rest)
    folder = Path(order.folder)
    replay = Replay(folder / "replay", order.most_bytes, order.most_seconds)
    tell({"ready": True})
    OnlineTraining(learner, replay, folder / "offers", tell, rest, idle, order.seed).go()


def decoder_learner(order: Order, rest: Callable[[], None]) -> WeightsInTraining:
    """A decoder in training.

    Raises:
        StartupError: it cannot be read, or its weights or home texts.
    """
    from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
    from tandem.inference.loading.learnt_weights import load_weights
    from tandem.inference.loading.partial import ModelPart
    from tandem.online.home import home_texts
    from tandem.online.learner import LENGTH, Learner

    part = ModelPart(order.exit, order.skip)
    source = CheckpointSource(order.model, dtype="float32", adapter=order.adapter, part=part)
    first, model = (read_checkpoint(source).model.eval() for _ in range(2))
    if order.weights:
        load_weights(model, Path(order.weights))
    length = min(LENGTH, model.config.get_text_config().max_position_embeddings - 1)
    kept = Path(order.folder) / "home.safetensors"
    return Learner(model, first, home_texts(order.home, order.model, first, length, kept), rest)


def head_learner(order: Order, rest: Callable[[], None]) -> WeightsInTraining:
    """A head in training.

    Raises:
        StartupError: it cannot be read, or its weights, its target or home texts.
    """
    from tandem.inference.heads.load import load_head
    from tandem.inference.heads.target_parts import TargetParts
    from tandem.inference.kv.size import Room
    from tandem.inference.loading.checkpoint import CheckpointSource
    from tandem.inference.loading.learnt_weights import load_weights
    from tandem.online.heads.home import head_home
    from tandem.online.heads.learner import HeadLearner
    from tandem.online.learner import LENGTH

    source = CheckpointSource(order.model, dtype="float32")
    head = load_head(source, order.head, order.target, Room(_POSITIONS, _POSITIONS))
    model = head.trained()
    if order.weights:
        load_weights(model, Path(order.weights))
    longest = TargetParts(order.target).longest if order.target else LENGTH + 1
    length, kept = min(LENGTH, longest - 1), Path(order.folder) / "home.safetensors"
    home = head_home(order.target, order.home, length, kept, head.reads, rest)
    return HeadLearner(head, model, home, rest)


def _end_with_the_drafter() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
