"""What the texts of a pair learn together, and what makes them learn it again."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.sizes.goodput import sizes
from orchestrator.sizes.policies import SizePolicies
from tandem.peers.text.contracts import SizePolicy
from tandem.peers.text.values import Generation, Rule, Stopping
from tandem.profile import PassTime
from tandem.speculation.request.sampling import Sampling

MS = 1_000_000
DRAFT = [(1, 1, MS / 10)]


def by_passes(*ms: float) -> list[PassTime]:
    """Of one text, with 1, 5 and 17 rows."""
    return [(1, rows, MS * each) for rows, each in zip((1, 5, 17), ms, strict=True)]


# Without drafts and with them: a row costs as much as a pass, or nothing.
DEAR, CHEAP = by_passes(1, 5, 17), by_passes(1, 1, 1)


def policy(policies: SizePolicies, verify: Sequence[PassTime], pair: str = "pair") -> SizePolicy:
    generation = Generation(
        "text",
        (1, 2, 3),
        Sampling(seed=1),
        Stopping(100),
        "block",
        Rule("block"),
        None,
        0,
        sizes(16, 0, None, 0),
    )
    return policies.policy_for(generation, pair, verify, DRAFT)


def test_another_back_end_has_other_sizes() -> None:
    policies = SizePolicies(lambda: 1)
    assert policy(policies, DEAR).begins_drafting, "the first text tries it"
    for verify in (DEAR, CHEAP, DEAR):
        assert policy(policies, verify).begins_drafting == (verify is CHEAP)


def test_what_is_accepted_stays_known_with_another_back_end() -> None:
    policies = SizePolicies(lambda: 1)
    policy(policies, DEAR)
    learnt = policies._adaptation
    policy(policies, CHEAP)
    assert policies._adaptation is learnt
    policy(policies, CHEAP, "another pair")
    assert policies._adaptation is not learnt
