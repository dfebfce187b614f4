"""A worker without an engine: it writes random tokens, or misbehaves as its target's name asks."""

from __future__ import annotations

import os
import random
import sys
import threading
import time

from benchmarks.peers.protocol import Generate, Load, serve

_VOCAB = 4


class Fake:
    """Draws four tokens with equal probability, except with drafts of a "skewed" target."""

    def load(self, load: Load) -> dict[str, str]:
        self._target = load.target
        sys.stdout.write("chatter that is no answer\n")
        if load.target == "missing":
            raise FileNotFoundError("no such target")
        if load.target == "crash":
            sys.stderr.write("last words\n")
            sys.stderr.flush()
            os._exit(3)
        if load.target == "hang":
            time.sleep(600)
        if load.target == "spin":
            threading.Thread(target=_spin, daemon=True).start()
        return {"fake": "1"}

    def generate(self, generate: Generate) -> list[list[int]]:
        if self._target == "fails at 8" and generate.gamma == 8:
            raise RuntimeError("out of drafts")
        skewed = self._target == "skewed" and generate.gamma > 0
        weights = [1.0, 1.0, 1.0, 3.0 if skewed else 1.0]
        texts = []
        for seed in generate.seeds:
            draws = random.Random(seed) if generate.temperature else random.Random(0)
            texts.append(draws.choices(range(_VOCAB), weights, k=generate.new_tokens))
        return texts

    def close(self) -> None:
        pass


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    serve(Fake())
