"""vLLM's worker and runner, given the tokens of each pass and asked for rows of logits.

vLLM's own scheduler, sampler and drafts are not used: a `RaggedPass` describes a pass, and what its
rows decide is Tandem's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as PlatformRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as PlatformRunner
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


@dataclass
class RaggedPass(SchedulerOutput):  # type: ignore[misc]
    """A pass, as vLLM's scheduler would describe it, and its tokens.

    Attributes:
        tokens: of each sequence, at the positions after those that are computed.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)


class Runner(PlatformRunner):  # type: ignore[misc]
    """Computes the tokens that it is given."""

    def _update_states(self, scheduler_output: RaggedPass) -> Callable[[], None] | None:
        later: Callable[[], None] | None = super()._update_states(scheduler_output)
        batch = self.input_batch
        for name, tokens in scheduler_output.tokens.items():
            row = batch.req_id_to_index[name]
            start = batch.num_computed_tokens_cpu[row]
            batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
        return later


class Worker(PlatformWorker):  # type: ignore[misc]
    """One rank of a model."""

    def init_device(self) -> None:
        """See vLLM's."""
        super().init_device()
        self.model_runner.__class__ = Runner

    def score(self, step: RaggedPass) -> tuple[list[str], Tensor]:
        """Compute a pass.

        Returns:
            The sequences in the order of their rows; and the rows [R, V] on the device, of each
            sequence one more than it has drafted tokens.
        """
        self.execute_model(step)
        runner: Any = self.model_runner
        state, runner.execute_model_state = runner.execute_model_state, None
        return runner.input_batch.req_ids, state.logits


class NoProposer:
    """Stands where vLLM looks for a drafter: with one, it computes rows of drafted tokens."""

    def __init__(self, config: Any) -> None: ...

    def load_model(self, model: Any) -> None:
        """It has none."""

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """Is never asked."""
        raise NotImplementedError
