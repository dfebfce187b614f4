"""What the texts of a pair learn together, and what makes them learn it again."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.sizes.adaptive import Adaptation
from orchestrator.sizes.goodput import PLAIN, sizes
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


def learnt(policies: SizePolicies) -> Adaptation:
    assert policies._adaptation is not None
    return policies._adaptation


def test_another_back_end_has_other_sizes() -> None:
    policies = SizePolicies(lambda: 1)
    assert policy(policies, DEAR).begins_drafting, "the first text tries it"
    for verify in (DEAR, CHEAP, DEAR):
        assert policy(policies, verify).begins_drafting == (verify is CHEAP)


def test_of_several_texts_too() -> None:
    policies = SizePolicies(lambda: 4)
    for verify in (DEAR, CHEAP, DEAR):
        policy(policies, verify)
        best = learnt(policies).best_of_all(sizes(16, 0, None, 0))
        assert (best == PLAIN) == (verify is DEAR)


def test_open_texts_rank_their_sizes_again() -> None:
    policies = SizePolicies(lambda: 1)
    policy(policies, DEAR)
    turns = learnt(policies).turns
    policy(policies, DEAR)
    assert learnt(policies).turns == turns
    policy(policies, CHEAP)
    assert learnt(policies).turns == turns + 1


def test_what_rounds_took_is_forgotten_with_their_back_end_and_not_before() -> None:
    policies = SizePolicies(lambda: 1)
    policy(policies, DEAR)
    times = learnt(policies).times
    policy(policies, [(texts, rows, 1.2 * ns) for texts, rows, ns in DEAR])  # another replica's
    assert learnt(policies).times is times
    policy(policies, CHEAP)
    assert learnt(policies).times is not times


def test_what_is_accepted_stays_known_with_another_back_end() -> None:
    policies = SizePolicies(lambda: 1)
    policy(policies, DEAR)
    everyone, accepted = learnt(policies), learnt(policies).acceptance
    policy(policies, CHEAP)
    assert learnt(policies) is everyone
    assert everyone.acceptance is accepted
    policy(policies, CHEAP, "another pair")
    assert learnt(policies) is not everyone
