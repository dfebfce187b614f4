"""vLLM on a CPU, plain or with `draft_model`; a process has one draft length for its life.

With `--mended` a defect of its CPU build is worked around, with `--drawn` drafts are drawn at the
text's temperature instead of being the likeliest tokens. With `--prefix-cache` texts share
prefixes; with `--streamed` one text tells when its tokens come. `--max-length N` is that of a text.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from typing import Any

from benchmarks.peers.protocol import Generate, Load, serve, timeline_of
from tandem_vllm.expand import mend

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Run the engine in this process: no messages between processes, and a pause stops all of it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_SEQUENCES = 64


class Vllm:
    """vLLM's offline engine.

    Attributes:
        timelines: of the last text, for the protocol.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.timelines: list[dict[str, Any]] = []

    def load(self, load: Load) -> dict[str, str]:
        """Load, compile and warm up; takes a minute or two.

        Raises:
            ValueError: more than one draft length is wanted.
        """
        os.environ.update(_SETTINGS)
        from vllm import LLM

        if len(load.gammas) != 1:
            raise ValueError("a vLLM process has one draft length")
        drafting: dict[str, Any] = {}
        if gamma := load.gammas[0]:
            drafting["speculative_config"] = {
                "method": "draft_model",
                "model": load.drafter,
                "num_speculative_tokens": gamma,
            }
            if self._options.drawn:
                drafting["speculative_config"]["draft_sample_method"] = "probabilistic"
        self._llm: Any = LLM(
            model=load.target,
            dtype=load.dtype,
            max_model_len=self._options.max_length,
            max_num_seqs=_SEQUENCES,
            enable_prefix_caching=self._options.prefix_cache,
            seed=0,
            **drafting,
        )
        if self._options.mended and not mend():
            raise RuntimeError("this vLLM has nothing to mend: see vllm#55005")
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    def generate(self, generate: Generate) -> list[list[int]]:
        """All texts in one call.

        Seeds are not passed on: with a seed per request, vLLM draws row by row, which is slower.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=generate.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=generate.new_tokens,
            ignore_eos=True,
        )
        prompts = [{"prompt_token_ids": list(ids)} for ids in generate.prompts]
        if self._options.streamed and len(prompts) == 1:
            return [self._streamed(prompts[0], sampling)]
        found = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [list(text.outputs[0].token_ids) for text in found]

    def _streamed(self, prompt: Any, sampling: Any) -> list[int]:
        """One text, step by step."""
        engine, asked_s = self._llm.llm_engine, time.monotonic()
        engine.add_request(str(asked_s), prompt, sampling)
        token_ids: list[int] = []
        arrivals: list[tuple[float, int]] = []
        while engine.has_unfinished_requests():
            for told in engine.step():
                known, token_ids = len(token_ids), list(told.outputs[0].token_ids)
                if len(token_ids) > known:
                    arrivals.append((time.monotonic(), len(token_ids) - known))
        self.timelines = [timeline_of(asked_s, arrivals)]
        return token_ids

    def close(self) -> None:
        """Nothing outlives the process."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--mended", "--drawn", "--prefix-cache", "--streamed"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--max-length", type=int, default=2048)
    serve(Vllm(parser.parse_args()))
