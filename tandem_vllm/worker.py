"""vLLM's worker, whose drafts come with their distributions and are decided by Tandem's rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tandem.errors import EngineFailure, StartupError
from tandem.speculation.draft import Draft
from tandem.verification import VERIFIERS
from tandem_vllm.drafting import DraftAsk, DraftingThread, VerifiedPass
from tandem_vllm.model import PROPOSER, check_arguments
from tandem_vllm.proposer import Proposer
from tandem_vllm.rule import NO_TOKEN, DraftedRows, TextNumbers, install
from tandem_vllm.sampling import sampling_of
from tandem_vllm.scheduler import DraftingScheduler, callers_of
from tandem_vllm.text import Opening, RemoteDraft

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as PlatformRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    PlatformRunner = GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

_log = structlog.get_logger(__name__)

_NO_DRAFT = Draft.certain(())


class DraftingRunner(PlatformRunner):  # type: ignore[misc]
    """Asks for drafts after each pass, and has them decided in the next one."""

    drafter: Proposer

    def begin_drafting(self) -> None:
        """To be called once."""
        self._rule = VERIFIERS[self.drafter.settings.verifier]
        self._drafts: dict[str, RemoteDraft] = {}
        self._numbers: dict[str, TextNumbers] = {}
        self._told: dict[str, int] = {}
        self._scheduled: dict[str, list[int]] = {}
        self._began_ns = 0
        # Of a text that reasons first, the grammar begins where no drafter knows.
        reasons = self.vllm_config.structured_outputs_config
        self._with_grammar = not reasons.reasoning_parser or reasons.enable_in_reasoning
        install()

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **named: Any) -> Any:
        """See vLLM's."""
        self._began_ns = time.time_ns()
        return super().execute_model(scheduler_output, *args, **named)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[[], None] | None:
        """Leave texts that are over, and open new ones beside the computation of their prompts."""
        later: Callable[[], None] | None = super()._update_states(scheduler_output)
        self._scheduled = scheduler_output.scheduled_spec_decode_tokens
        over = scheduler_output.finished_req_ids
        for name in over:
            for known in (self._drafts, self._numbers, self._told):
                known.pop(name, None)
        self.drafter.tell(lambda thread: thread.end(over))
        callers = callers_of(scheduler_output)
        openings = []
        for new in scheduler_output.scheduled_new_reqs:
            # Embeddings are no text, and pooling has none.
            if None in (new.prompt_token_ids, new.sampling_params) or new.prompt_embeds is not None:
                continue
            # A session that goes on has its name again, and numbers of its own.
            for known in (self._drafts, self._numbers):
                known.pop(new.req_id, None)
            self._told[new.req_id] = len(new.prompt_token_ids)
            openings.append(
                Opening(
                    new.req_id,
                    new.prompt_token_ids,
                    sampling_of(new.sampling_params, self._with_grammar),
                    self._room(new.req_id, len(new.prompt_token_ids)),
                    traceparent=callers.get(new.req_id, ""),
                )
            )
        self.drafter.tell(lambda thread: thread.open(openings))
        return later

    def _room(self, name: str, length: int) -> int:
        """Tokens that a text may still have."""
        request = self.requests[name]
        left: int = self.max_model_len - length
        asked: int | None = request.sampling_params.max_tokens
        return left if asked is None else min(left, request.num_prompt_tokens + asked - length)

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """See vLLM's; what it keeps of distributions is not used."""
        batch = self.input_batch
        names = batch.req_ids[: batch.num_reqs]
        most = min(self.drafter.gamma, scheduler_output.num_spec_tokens_to_schedule)

        def ask(thread: DraftingThread) -> dict[str, RemoteDraft]:
            asks = []
            for row, (name, new) in enumerate(zip(names, sampled_token_ids, strict=True)):
                length, told = int(batch.num_tokens_no_spec[row]), self._told.get(name)
                if not new or told is None:
                    continue
                # A draft of all that is left would leave no room for what follows it.
                gamma = min(most, self._room(name, length) - 1)
                tokens = batch.token_ids_cpu[row, told:length].tolist()
                asks.append(DraftAsk(name, tokens, max(gamma, 0)))
                self._told[name] = length
            verified = VerifiedPass(
                self._began_ns,
                time.time_ns(),
                scheduler_output.total_num_scheduled_tokens,
                names,
            )
            return thread.draft(asks, verified)

        found: dict[str, RemoteDraft] = self.drafter.shared(ask, {})
        # A text that is left out of a pass keeps its draft for a later one.
        for name in names:
            self._drafts.pop(name, None)
        self._drafts |= found
        return [found[name].draft.token_ids if name in found else [] for name in names]

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> DraftedRows:
        """In the place of vLLM's rows: drafts as they are scheduled, perhaps not whole."""
        drafts, rounds, numbers = [], [], []
        names = self.input_batch.req_ids
        for name, count in zip(names, spec_decode_metadata.num_draft_tokens, strict=True):
            scheduled = self._scheduled.get(name, ())
            # vLLM pads texts that begin with tokens that were not proposed.
            drafted = self._drafts[name] if count and NO_TOKEN not in scheduled else None
            drafts.append(drafted.draft.first(count) if drafted else _NO_DRAFT)
            rounds.append(drafted.round if drafted else 0)
            numbers.append(self._numbers_of(name, drafted) if drafted else None)
            if drafted and drafts[-1].token_ids != scheduled:
                raise EngineFailure("vLLM computes another draft than the one that was proposed")
        counts = spec_decode_metadata.num_draft_tokens
        return DraftedRows(self._rule, counts, drafts, rounds, numbers)

    def _numbers_of(self, name: str, drafted: RemoteDraft) -> TextNumbers:
        if name not in self._numbers:
            self._numbers[name] = TextNumbers(drafted.seed)
        return self._numbers[name]


class DraftingWorker(PlatformWorker):  # type: ignore[misc]
    """One rank of vLLM, for `--worker-cls tandem_vllm.DraftingWorker`."""

    def init_device(self) -> None:
        """See vLLM's.

        Raises:
            StartupError: vLLM's arguments have no drafts; the sentence says which are missing.
        """
        _check(self.vllm_config)
        super().init_device()
        runner = self.model_runner
        if not isinstance(runner, PlatformRunner) or not hasattr(runner, "drafter"):
            raise StartupError(
                f"tandem_vllm.DraftingWorker: {type(runner).__module__}.{type(runner).__name__}"
                " has no proposers of others' classes; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        runner.__class__ = DraftingRunner
        runner.begin_drafting()


def _check(config: VllmConfig) -> None:
    """Raises StartupError where drafts would not be made, or not be decided as they must be."""
    check_arguments(config)
    speculative = config.speculative_config
    if speculative is None or (speculative.method, speculative.model) != ("custom_class", PROPOSER):
        raise StartupError(
            "tandem_vllm.DraftingWorker needs --speculative-config"
            f' \'{{"method": "custom_class", "model": "{PROPOSER}", "num_speculative_tokens": 4}}\''
        )
    if not issubclass(config.scheduler_config.get_scheduler_cls(), DraftingScheduler):
        raise StartupError(
            "tandem_vllm.DraftingWorker needs --scheduler-cls tandem_vllm.DraftingScheduler:"
            " vLLM's own cuts drafts at tokens that a grammar forbids, which would bias the text"
        )
