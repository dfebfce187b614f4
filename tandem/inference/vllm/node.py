"""A machine that has a part of a model's ranks, and not the first one."""

from __future__ import annotations

import signal
from types import FrameType

import structlog
import torch
from transformers import AutoConfig

from tandem.errors import StartupError, first_line
from tandem.inference.threads import use_threads
from tandem.inference.vllm.arguments import VllmOptions, check_version, engine_arguments
from tandem.inference.vllm.other_ranks import OtherRanks, end_process
from tandem.inference.vllm.rank import RankPlan
from tandem.inference.vllm.reference import dtype_of

_log = structlog.get_logger(__name__)


def serve_ranks(options: VllmOptions) -> None:
    """Compute this node's part of the passes that node 0 sends, until that ends or SIGTERM comes.

    Raises:
        StartupError: one sentence on what is missing or does not fit.
    """
    check_version()
    numbers = options.ranks
    dtype = dtype_of(options.model, options.device, options.dtype)
    try:
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=False)
    except Exception as error:  # transformers passes on its readers' exceptions, of any kind
        raise StartupError(
            f"cannot load the model {options.model!r}: {first_line(error)}"
        ) from error
    arguments = engine_arguments(options, dtype, config)
    use_threads(options.threads)
    threads = max(torch.get_num_threads() // len(numbers), 1)
    kind = torch.device(options.device).type
    plan = RankPlan(arguments, 0, 0, kind, options.leader, threads)
    ranks = OtherRanks(plan, numbers, numbers.start, end_process)

    def end(number: int, frame: FrameType | None) -> None:
        ranks.close()

    signal.signal(signal.SIGTERM, end)
    _log.info("ranks of another node's target", ranks=list(numbers), leader=options.leader)
    ranks.wait()
