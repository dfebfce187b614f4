"""One rank of a model: vLLM's engine core in this process, without its scheduler's decisions.

    python -m tandem.inference.vllm.rank < plan.json

runs a rank that is not the first: it computes the passes that rank 0 sends, until rank 0 ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
import torch
from pydantic import ValidationError

from tandem.errors import StartupError, first_line

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from tandem.inference.vllm.worker import RaggedPass, Worker

_log = structlog.get_logger(__name__)

# vLLM reads them when it is imported. Users may set its other ones.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The other runner has no proposers of others' classes.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
}
_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    # Other services share the cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class RankPlan:
    """What a rank has to know.

    Attributes:
        arguments: of vLLM's engine.
        rank: its number.
        local_rank: its device.
        device: kind of device that is wanted.
        address: HOST:PORT where the ranks meet.
        threads: of a CPU.
    """

    arguments: dict[str, Any]
    rank: int
    local_rank: int
    device: str
    address: str
    threads: int = 1


class Rank:
    """A rank with its part of the weights and of the KV cache.

    Attributes:
        core: vLLM's.
        device: that it computes on.
        max_length: positions of the longest sequence.
    """

    def __init__(self, plan: RankPlan) -> None:
        """Load the model.

        Raises:
            StartupError: vLLM's own sentence.
        """
        _prepare()
        # OpenMP has a number for each thread that begins passes; vLLM replaces the function.
        self._use_threads = torch.set_num_threads
        self._threads, self._prepared = plan.threads, threading.local()
        try:
            self.core = _start(plan)
        except Exception as error:  # vLLM's readers and checks raise anything
            raise StartupError(f"vLLM: {_sentence(error)}") from error
        executor: Any = self.core.model_executor
        self._worker: Worker = executor.driver_worker.worker
        self.device: torch.device = self._worker.device
        self.max_length: int = self.core.vllm_config.model_config.max_model_len
        self._port = plan.address.rpartition(":")[2]
        self._alone = plan.arguments["tensor_parallel_size"] == 1

    def score(self, step: RaggedPass) -> tuple[list[str], torch.Tensor]:
        """Compute a pass on all ranks; only on rank 0.

        Returns:
            See `Worker.score`.
        """
        if self._alone:
            return self._score(step)
        try:
            self._send(step)
            return self._score(step)
        except Exception as error:  # the other ranks are in the middle of this pass
            end_process(f"rank 0 failed in a pass: {_sentence(error)}")

    def end(self) -> None:
        """Let the other ranks end; only on rank 0."""
        if not self._alone:
            self._send(None)

    def close(self) -> None:
        """Give back what vLLM shares with other processes; after `end`."""
        self.core.shutdown()
        if self.device.type == "cpu":  # memory by which ranks add up, which vLLM leaves behind
            for shared in Path("/dev/shm").glob(f"{self._port}-*-cpushm_*"):
                shared.unlink(missing_ok=True)

    def follow(self) -> None:
        """Compute what rank 0 sends, until it ends; only on other ranks."""
        from vllm.distributed.parallel_state import get_tp_group

        while (step := get_tp_group().broadcast_object()) is not None:
            self._score(step)

    def _score(self, step: RaggedPass) -> tuple[list[str], torch.Tensor]:
        if not hasattr(self._prepared, "here"):
            self._use_threads(self._threads)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._prepared.here = True
        return self._worker.score(step)

    def _send(self, step: RaggedPass | None) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        get_tp_group().broadcast_object(step)


def _prepare() -> None:
    """Set what vLLM reads when it is imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Its lines speak of its own server's options.
    quiet = logging.getLogger().level > logging.DEBUG
    logging.getLogger("vllm").setLevel(logging.ERROR if quiet else logging.DEBUG)


def _start(plan: RankPlan) -> EngineCore:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    if current_platform.device_type != plan.device:
        raise ValueError(
            f"this build computes on {current_platform.device_type}, and DEVICE is {plan.device}"
        )

    class Executor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        """Has its place from the plan, not from the environment."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"tcp://{plan.address}", plan.rank, plan.local_rank

    # It reads `vars(value).get` of the objects of all modules: of llvmlite's library, which numba
    # brings, that is an AttributeError ('_lib_fn_wrapper' object has no attribute 'get').
    dispatcher.vars = _variables
    config = EngineArgs(**plan.arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return EngineCore(config, Executor, log_stats=False)


def _sentence(error: Exception) -> str:
    """What an error says. A fault of a setting has its sentence after its first line."""
    if isinstance(error, ValidationError):
        return "; ".join(str(fault["msg"]) for fault in error.errors(include_url=False))
    return f"{type(error).__name__}: {first_line(error)}"


def _variables(value: object) -> Mapping[str, Any]:
    """`vars`, of any object."""
    found: Any = vars(value)
    return found if isinstance(found, Mapping) else {}


def end_process(sentence: str, code: int = 1) -> NoReturn:
    """End this process, whose pass would never end: texts go on elsewhere."""
    _log.critical("a model without all of its ranks computes nothing", reason=sentence)
    os._exit(code)


def written(plan: RankPlan) -> str:
    """A plan as `main` reads it."""
    return json.dumps(asdict(plan))


def main() -> None:
    """Run a rank that is not the first; ends when standard input does."""
    # A terminal's Ctrl-C is for rank 0, which lets texts finish.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    plan = RankPlan(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        rank = Rank(plan)
    except StartupError as error:
        sys.stderr.write(f"rank {plan.rank}: {error}\n")
        sys.exit(2)
    rank.follow()
    rank.close()


def _end_with_parent() -> None:
    """A rank whose first one is gone would wait for it for ever, in the middle of a pass."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
