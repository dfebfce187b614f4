"""Mutated drafts, given to the target's code that checks them and decides on them."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch

from tandem.common.v1 import common_pb2
from tandem.engine.answers import ScoredRows
from tandem.engine.asks import Decide
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.rpc.messages import draft_from, draft_to
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import VerdictNumbers
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from tandem.verification.kernels.faults import faults
from tests.fuzz.read.contract import breaks
from tests.fuzz.read.surface import MessageSurface, Violation
from tests.fuzz.seeds import CHAINS, DRAFTS, MAX_GAMMA, MAX_NODES, PROBE_TOKENS
from tests.support.models.tiny import VOCAB_SIZE

_SAMPLING = Sampling(seed=7)
# Of rows that leave one token out.
_RULES = sorted(VERIFIERS)
_LOGITS = torch.randn(MAX_NODES + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
_LOGITS[:, 3] = -torch.inf


class Drafts(MessageSurface):
    """A draft is taken exactly where it keeps the contract; then it is decided, beside others."""

    name = "draft"
    share = 0.69
    seeds = DRAFTS

    def __init__(self) -> None:
        self._neighbour = draft_from(CHAINS[2], VOCAB_SIZE, MAX_GAMMA, MAX_NODES)
        self._alone = {name: _decided(name, [self._neighbour])[0] for name in _RULES}

    async def judge(self, message: Any) -> str:
        """What was announced, and which rule decides, is the bytes' business too."""
        pick = crc32(message.SerializeToString(deterministic=True))
        rule, nodes = _RULES[pick % len(_RULES)], MAX_NODES * bool(pick % 7)
        bad = breaks(message, VOCAB_SIZE, MAX_GAMMA, nodes, PROBE_TOKENS)
        try:
            draft = draft_from(message, VOCAB_SIZE, MAX_GAMMA, nodes, PROBE_TOKENS)
        except Exception:
            if not bad:
                raise Violation(message.SerializeToString(), "a sound draft is refused") from None
            raise
        found = faults([self._neighbour, draft], VOCAB_SIZE)
        self.sentence = found.get(1, "")
        if bool(found) != bad:
            sentence = "a broken draft is taken" if bad else "a sound draft's rows are refused"
            raise Violation(message.SerializeToString(), sentence)
        if bad:
            return "INVALID_ARGUMENT"
        again = draft_from(draft_to(draft), VOCAB_SIZE, MAX_GAMMA, nodes, PROBE_TOKENS)
        if (again.token_ids, again.probes) != (draft.token_ids, draft.probes):
            raise Violation(message.SerializeToString(), "it does not cross the wire again")
        self.sentence = draft.misfit(VERIFIERS[rule].takes)
        if self.sentence:
            return "INVALID_ARGUMENT"
        self._decide(message, rule, draft)
        return "OK"

    def _decide(self, message: common_pb2.Draft, name: str, draft: Draft) -> None:
        fixed = VERIFIERS[name].needs_every_draft
        neighbours = [] if fixed else [self._neighbour]
        *beside, decision = _decided(name, [*neighbours, draft])
        sound = (
            decision is not None
            and 0 <= decision.place <= len(draft)
            and 0 <= decision.next_token < VOCAB_SIZE
            and 3 not in (decision.next_token, *_kept(draft, decision.place))
            and all(0 <= overlap <= 1 + 1e-5 for overlap in decision.overlaps)
        )
        if not sound:
            raise Violation(message.SerializeToString(), f"{name} decides {decision}")
        if beside and _told(beside[0]) != _told(self._alone[name]):
            raise Violation(message.SerializeToString(), f"{name}'s verdict beside it is {beside}")


def _told(decision: Any) -> Any:
    return decision.place, decision.next_token, decision.overlaps


def _kept(draft: Draft, place: int) -> list[int]:
    return [draft.token_ids[at - 1] for at in draft.path_to(place)]


def _decided(name: str, drafts: list[Draft]) -> list[Any]:
    asks = []
    for draft in drafts:
        count = len(set(draft.row_of_places()))
        numbers = VerdictNumbers.of(_SAMPLING.seed)
        scored = ScoredRows(_LOGITS, 0, count)
        rule = VERIFIERS[name]
        asks.append(Decide(rule, draft, scored, _SAMPLING, None, numbers, 1))
    return decisions_of([_sound(answer) for answer in decide(asks)])


def _sound(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
