"""vLLM's proposer: drafts come from Tandem's drafters.

By itself, as the class of `method: custom_class`, it proposes tokens without their distributions:
vLLM then takes each for certain. That is exact for any drafter, and keeps fewer tokens than a rule
that knows the rows (`tandem_vllm.worker`).
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
from vllm.distributed.parallel_state import get_tp_group
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tandem.settings import read_settings
from tandem.telemetry import logs
from tandem.telemetry.tracing import switch as tracing
from tandem_vllm.drafting import DraftingThread
from tandem_vllm.expand import mend
from tandem_vllm.model import check_arguments, check_version, described
from tandem_vllm.rows import TextsOfRows
from tandem_vllm.settings import PluginSettings

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_SERVICE = "tandem-vllm"
# Others are vLLM's and its user's.
_LOGGERS = ("tandem", "tandem_vllm", "opentelemetry.tandem")


class Proposer:
    """Asks drafters on the first rank, and tells the others.

    Attributes:
        gamma: the longest draft.
        settings: of the plugin.

    Args:
        vllm_config: vLLM's, of the whole engine.

    Raises:
        StartupError: the settings or vLLM's arguments are unfit.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_version()
        check_arguments(vllm_config)
        mend()
        # Where one text is nearly as long as may be, vLLM would ask no drafter at all, and would
        # take zeros for drafts. What is asked for here fits.
        GPUModelRunner._input_fits_in_drafter = lambda _, metadata: metadata is not None
        self.settings = settings = read_settings(PluginSettings)
        logs.configure(_SERVICE, settings.log_level, settings.log_format, _LOGGERS)
        model = vllm_config.model_config
        tokenizer = None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)
        target = described(vllm_config, tokenizer)
        self.gamma = int(target.max_gamma)
        self._ranks = get_tp_group()
        self._thread: DraftingThread | None = None
        if self._ranks.rank_in_group == 0:
            writer = tracing.configure(_SERVICE, settings.trace_file)
            self._thread = DraftingThread(settings, target)
            # Unlike atexit's, they run in processes that vLLM has forked; the higher one first.
            Finalize(None, self._thread.close, exitpriority=20)
            if writer is not None:
                Finalize(None, writer.close, exitpriority=10)
        self._texts = TextsOfRows(self.gamma, int(target.max_length))

    def load_model(self, model: Any) -> None:
        """It has none."""

    def tell(self, news: Callable[[DraftingThread], None]) -> None:
        """Tell the first rank's thread."""
        if self._thread is not None:
            news(self._thread)

    def shared(self, ask: Callable[[DraftingThread], T], nothing: T) -> T:
        """What the first rank's thread gives, on each rank; nothing where it fails. A pass without
        drafts is better than none, and the other ranks wait for it."""
        found = nothing
        if self._thread is not None:
            try:
                found = ask(self._thread)
            except Exception:
                _log.exception("vLLM goes on without drafts")
        return found if self._ranks.world_size == 1 else self._ranks.broadcast_object(found, src=0)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Tokens after each text; see vLLM's interface of proposers.

        Args:
            sampled_token_ids: of each row, by the last pass; none in the middle of a prompt.
            num_tokens_no_spec: [rows], lengths of the texts.
            token_ids_cpu: [rows, longest], the texts.
            slot_mappings: unused.
        """

        def ask(thread: DraftingThread) -> list[list[int]]:
            rows = self._texts.match(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            thread.end(rows.ended)
            thread.open(rows.openings)
            drafts = thread.draft(list(rows.asks.values()))
            proposed: list[list[int]] = [[] for _ in sampled_token_ids]
            for row, asked in rows.asks.items():
                if asked.name in drafts:
                    proposed[row] = drafts[asked.name].draft.token_ids
            return proposed

        return self.shared(ask, [[] for _ in sampled_token_ids])
