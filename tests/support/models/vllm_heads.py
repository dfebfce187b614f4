"""Run by vLLM's own Python: what its classes compute for a head while it drafts.

    python vllm_heads.py TARGET HEAD METHOD OUT

Writes OUT (.npz): of each call of the head's model its token ids, positions and states, and of each
call for logits its input and result, in order.
"""

import os
import sys
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

PROMPT = [1, 5, 9, 2, 7, 3, 11, 4]


def main(target: str, head: str, method: str, out: str) -> None:
    """Generate a few tokens greedily, and keep what the head computed."""
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import llama_eagle, llama_eagle3, medusa, qwen3_eagle3

    found: dict[str, Any] = {}
    names = iter(range(10_000))

    def keep(kind: str, *tensors: Any) -> None:
        number = next(names)
        for i, tensor in enumerate(tensors):
            found[f"{number:04}.{kind}.{i}"] = tensor.detach().float().numpy().copy()

    def watch(kind: Any) -> None:
        forward, logits = kind.forward, kind.compute_logits

        def forwarded(self: Any, *args: Any, **named: Any) -> Any:
            given = [*args, *named.values()]
            result = forward(self, *args, **named)
            outs = result if isinstance(result, (tuple, list)) else [result]
            keep("forward", *(each for each in (*given, *outs) if hasattr(each, "detach")))
            return result

        def computed(self: Any, states: Any, *args: Any, **named: Any) -> Any:
            result = logits(self, states, *args, **named)
            both = [
                each
                for side in (states, result)
                for each in (side if isinstance(side, list) else [side])
            ]
            keep("logits", *both)
            return result

        kind.forward, kind.compute_logits = forwarded, computed
        if hasattr(kind, "combine_hidden_states"):
            combine = kind.combine_hidden_states

            def combined(self: Any, states: Any) -> Any:
                result = combine(self, states)
                keep("combine", states, result)
                return result

            kind.combine_hidden_states = combined

    for kind in (
        llama_eagle.EagleLlamaForCausalLM,
        llama_eagle3.Eagle3LlamaForCausalLM,
        qwen3_eagle3.Eagle3Qwen3ForCausalLM,
        medusa.Medusa,
    ):
        watch(kind)
    llm = LLM(
        model=target,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config={"method": method, "model": head, "num_speculative_tokens": 3},
    )
    found.clear()
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    texts = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    found["text"] = np.array([*PROMPT, *texts[0].outputs[0].token_ids])
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
