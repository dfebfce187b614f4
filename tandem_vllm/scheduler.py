"""vLLM's scheduler, which leaves drafts as they were drawn.

vLLM's own cuts a draft at its first token that a grammar forbids. A token that was drawn and is
withdrawn for what it is biases the text: it has to be refused by the rule, whose correction pays
for it. Here the draft stays whole, and the mask gives that token probability 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

# What masks take for the end of a draft.
_NO_TOKEN = -1


class DraftingScheduler(Scheduler):  # type: ignore[misc]
    """For `--scheduler-cls tandem_vllm.DraftingScheduler`."""

    def schedule(self, *args: Any, **named: Any) -> SchedulerOutput:
        """See vLLM's. New requests go to the worker with their callers' traces."""
        scheduled: SchedulerOutput = super().schedule(*args, **named)
        callers = {}
        for new in scheduled.scheduled_new_reqs:
            headers = self.requests[new.req_id].trace_headers or {}
            if "traceparent" in headers:
                callers[new.req_id] = headers["traceparent"]
        if callers:
            scheduled.tandem_callers = callers
        return scheduled

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """See vLLM's."""
        super().update_draft_token_ids(draft_token_ids)
        names, drafts = draft_token_ids.req_ids, draft_token_ids.draft_token_ids
        for name, token_ids in zip(names, drafts, strict=True):
            request = self.requests.get(name)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            request.spec_token_ids = token_ids

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """See vLLM's. Rows after a forbidden token are never reached; their masks do not count."""
        whole = scheduler_output.scheduled_spec_decode_tokens
        scheduler_output.scheduled_spec_decode_tokens = {
            name: self._until_forbidden(name, token_ids) for name, token_ids in whole.items()
        }
        try:
            return super().get_grammar_bitmask(scheduler_output)
        finally:
            scheduler_output.scheduled_spec_decode_tokens = whole

    def _until_forbidden(self, name: str, token_ids: list[int]) -> list[int]:
        request = self.requests[name]
        if not request.use_structured_output:
            return token_ids
        drafted = [token_id for token_id in token_ids if token_id != _NO_TOKEN]
        valid = self.structured_output_manager.validate_tokens(request, drafted)
        return [*valid, *[_NO_TOKEN] * (len(token_ids) - len(valid))]


def callers_of(scheduled: SchedulerOutput) -> Mapping[str, str]:
    """Traceparents of new requests, by their names; of those that are traced."""
    return getattr(scheduled, "tandem_callers", {})
