"""Plausible and wrong: what the tests of the plugin have to notice."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from tandem.verification.block import BlockVerifier
from tandem_vllm.scheduler import DraftingScheduler
from tandem_vllm.worker import DraftingWorker


class _Lenient(BlockVerifier):
    def verify(self, proposal: Any, target_probs: Any, uniforms: Any, carry: Any = None) -> Any:
        eased = torch.cat((0.6 * uniforms[:, :-1], uniforms[:, -1:]), 1)
        return super().verify(proposal, target_probs, eased, carry)


class LenientWorker(DraftingWorker):
    """Its rule keeps too many."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner._rule = _Lenient()


class CuttingScheduler(DraftingScheduler):
    """Cuts drafts as vLLM's does."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        Scheduler.update_draft_token_ids(self, draft_token_ids)
