"""A machine that has a part of a model's ranks, and not the first one."""

from __future__ import annotations

import signal
from types import FrameType

import structlog
import torch

from tandem.errors import StartupError, first_line
from tandem.inference.loading.weights import dtype_of, read_config
from tandem.inference.threads import use_threads
from tandem.inference.vllm.arguments import VllmOptions, check_version, engine_arguments
from tandem.inference.vllm.other_ranks import OtherRanks
from tandem.inference.vllm.rank import RankPlan, end_process
from tandem.inference.vllm.tether import Tether

_log = structlog.get_logger(__name__)
# Machine 0 reads the checkpoint before its ranks start.
_START_SECONDS = 1800.0


def serve_ranks(options: VllmOptions) -> None:
    """Compute this node's part of the passes that node 0 sends, until that ends or SIGTERM comes.

    Raises:
        StartupError: one sentence on what is missing or does not fit.
    """
    check_version()
    numbers = options.ranks
    dtype = dtype_of(options.model, options.device, options.dtype)
    arguments = engine_arguments(options, dtype, read_config(options.model))
    use_threads(options.threads)
    threads = max(torch.get_num_threads() // len(numbers), 1)
    kind = torch.device(options.device).type
    plan = RankPlan(arguments, 0, 0, kind, options.leader, threads)
    ranks = OtherRanks(plan, numbers, numbers.start, end_process)
    tether = Tether(lambda sentence: end_process(sentence) if ranks.left() else None)

    def end(number: int, frame: FrameType | None) -> None:
        tether.close()
        ranks.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    _log.info("ranks of another node's target", ranks=list(numbers), leader=options.leader)
    try:
        tether.connect(*options.tether, _START_SECONDS)
    except OSError as error:
        ranks.close()
        raise StartupError(f"machine 0 is not at {options.leader}: {first_line(error)}") from error
    ranks.wait()
