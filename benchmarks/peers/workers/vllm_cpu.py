"""vLLM on a CPU, plain or with `draft_model`; a process has one draft length for its life.

With `--mended` a defect of its CPU build is worked around, with `--drawn` drafts are drawn at the
text's temperature instead of being the likeliest tokens.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

from benchmarks.peers.protocol import Generate, Load, serve
from tandem_vllm.expand import mend

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Run the engine in this process: no messages between processes, and a pause stops all of it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_SEQUENCES = 64
_MAX_LENGTH = 2048


class Vllm:
    """vLLM's offline engine.

    Args:
        mended: work around vllm#55005.
        drawn: draw drafts, so that the rejection sampler has the drafter's distributions.
    """

    def __init__(self, mended: bool = False, drawn: bool = False) -> None:
        self._mended = mended
        self._drawn = drawn

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
            if self._drawn:
                drafting["speculative_config"]["draft_sample_method"] = "probabilistic"
        self._llm: Any = LLM(
            model=load.target,
            dtype=load.dtype,
            max_model_len=_MAX_LENGTH,
            max_num_seqs=_SEQUENCES,
            enable_prefix_caching=False,
            seed=0,
            **drafting,
        )
        if self._mended and not mend():
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
        found = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [list(text.outputs[0].token_ids) for text in found]

    def close(self) -> None:
        """Nothing outlives the process."""


if __name__ == "__main__":
    serve(Vllm(mended="--mended" in sys.argv, drawn="--drawn" in sys.argv))
