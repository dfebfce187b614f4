"""What a text is made of: its emission, target and drafter, and the session over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.front.validation import Validator
from orchestrator.pool.peers_of_text import PeersOfText
from orchestrator.pool.pool import ReplicaPool
from orchestrator.settings import OrchestratorSettings
from orchestrator.sizes.policies import SizePolicies
from orchestrator.text.emission import Emission
from orchestrator.text.session import Session
from orchestrator.text.target_failover import TargetWithFailover
from tandem.errors import TandemError
from tandem.peers.replicas.compatibility import Capabilities, longest_text
from tandem.peers.text.contracts import Prompt
from tandem.peers.text.drafter_failover import DrafterWithFailover
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Generation
from tandem.rpc.messages import AROUND_BYTES
from tandem.speculation.tree import DraftSize


class TextParts:
    """The parts of one text, which need each other.

    Attributes:
        emission: makes rounds of verdicts.
        target: with a fresh target.
        drafter: with a fresh drafter, or without any.

    Args:
        generation: the validated request.
        validator: of the pair that the text began with.
        peers: makes sequences for it.
        pool: that has them.
        settings: of the orchestrator.
        record: the text's.
    """

    def __init__(
        self,
        generation: Generation,
        validator: Validator,
        peers: PeersOfText,
        pool: ReplicaPool,
        settings: OrchestratorSettings,
        record: TextRecord,
    ) -> None:
        self._generation, self._record = generation, record
        self._capabilities = validator.capabilities
        self._peers, self._pool, self._settings = peers, pool, settings
        self._spell = validator.codec.spell if settings.trace_text else None
        model, stopping = self._capabilities.target, generation.stopping
        self.emission = Emission(
            stopping,
            model.eos_token_ids,
            validator.codec.stream(generation.prompt_ids, stopping.strings),
            record.counts,
        )
        ends = () if stopping.ignore_eos else tuple(model.eos_token_ids)
        self.target = TargetWithFailover(
            generation,
            peers,
            model.vocab_size,
            (*stopping.token_ids, *ends),
            self._capabilities.max_rounds,
        )
        # Drafts of the target itself would be others.
        self._waits = generation.waits_for_drafter and not self._capabilities.by_target
        self.drafter = self._drafter()

    def _drafter(self) -> DrafterWithFailover:
        drafting, peers = self._capabilities.drafter, self._peers
        return DrafterWithFailover(
            make=peers.drafter,
            prompt=self._drafters_prompt,
            record=self._record,
            seconds=self._opening_seconds,
            rule=self._generation.rule,
            on_loss=self._lose_drafter,
            let_go=peers.let_drafter_go,
            most_feedback_bytes=drafting.max_message_bytes - AROUND_BYTES
            if drafting is not None
            else 0,
            wait_for=peers.drafter_with_room if self._waits else None,
        )

    def _drafters_prompt(self) -> Prompt:
        """What opens a sequence on a drafter, which may hold less of the text than its target."""
        prompt = replace(
            self.target.prompt, in_full=self._waits or self._generation.rule.needs_every_draft
        )
        held = self._generation.drafter_holds
        if held is None:
            return prompt
        left = held - len(prompt.token_ids)
        return replace(prompt, max_new_tokens=min(prompt.max_new_tokens, left))

    def _opening_seconds(self) -> float:
        """How long the first round waits for a drafter that opens, by now."""
        length = len(self._generation.prompt_ids)
        seconds = self._pool.drafter_deadlines.opening(
            length, self._generation.rule.needs_every_draft
        )
        return min(seconds, self._settings.draft_seconds)

    def _lose_drafter(self, error: TandemError | None) -> None:
        self._peers.drafting.note_lost(error)
        self._record.lose_drafter()

    def session(self, sizes: SizePolicies) -> Session:
        """Over these parts.

        Args:
            sizes: makes the text's policy.
        """
        generation, capabilities = self._generation, self._capabilities
        own_size = None if self._waits else own_size_of(capabilities, generation)
        # A rule that needs every draft cannot turn to the target's drafts later.
        alone = generation.rule.needs_every_draft and own_size is not None
        alone = alone and not self._pool.drafter_count
        return Session(
            generation,
            drafter=self.drafter,
            target=self.target,
            policy=sizes.policy_for(
                generation,
                capabilities.pair,
                *self._pool.pass_times(capabilities),
                # Nothing is prepared for texts whose logits are shaped.
                prepares=capabilities.prepares and not generation.sampling.shaping,
            ),
            emission=self.emission,
            record=self._record,
            own_size=own_size,
            by_target=capabilities.by_target or alone,
            spell=self._spell,
        )


def own_size_of(
    capabilities: Capabilities, generation: Generation
) -> Callable[[DraftSize], DraftSize] | None:
    """What a text's target drafts itself where a size is chosen; None where it drafts nothing for
    this text."""
    own = capabilities if capabilities.by_target else capabilities.without_drafters
    if own is None or own.drafter is None or generation.rule.name not in own.rules:
        return None
    if generation.rule.needs_every_draft and generation.sizes[0].gamma > own.largest.gamma:
        return None
    tokens = len(generation.prompt_ids) + generation.stopping.max_new_tokens
    longest = own.drafter.max_length
    if generation.rule.needs_every_draft:
        longest = longest_text(own.drafter, 0)
    return own.own_size if tokens <= longest else None
