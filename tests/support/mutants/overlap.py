"""Mutants of targets whose layers overlap."""

from __future__ import annotations

from tests.support.mutants.serving import Mutant

_FLIGHT = "tandem/inference/flight.py"
_ROUND = "target_svc/overlap.py"
_PASS = "tandem/inference/passes/overlapped.py"
_POOL = "tandem/inference/kv/pool.py"
_TESTS = ("tests/unit/target/test_overlap.py",)

OF_OVERLAP = (
    Mutant(
        "overlap: a wrong guess goes on as the token",
        _FLIGHT,
        "right = parent == 1 and token.token_id == token_id and not kept",
        "right = parent == 1 and not kept",
        _TESTS,
    ),
    Mutant(
        "overlap: the lower layers of a wrong guess are kept for the right one",
        _FLIGHT,
        "self.tokens = [self.tokens[row - 1] for row in kept]",
        "states = [one.states for one in self.tokens[1:]]\n"
        "        self.tokens = [self.tokens[row - 1] for row in kept]\n"
        "        for one, other in zip(self.tokens, states):\n"
        "            one.states = other",
        _TESTS,
    ),
    Mutant(
        "overlap: guesses after a wrong one stay",
        _FLIGHT,
        "if right or parent in kept:",
        "if right or row > 2 and parent > 1 or parent in kept:",
        _TESTS,
    ),
    Mutant(
        "overlap: an exit's row is the text's",
        _ROUND,
        "if flight.tokens[0].through == self.groups:",
        "if flight.tokens[0].through >= self.groups - 1:",
        _TESTS,
    ),
    Mutant(
        "overlap: the row of the newest token is the text's",
        _ROUND,
        "NO_DRAFT, scored.at(0), wanted, shaped",
        "NO_DRAFT, scored.at(len(flight.tokens) - 1), wanted, shaped",
        _TESTS,
    ),
    Mutant(
        "overlap: a flight outlives a round with a draft",
        "target_svc/round.py",
        "sequence.flight = None  # the pass writes over it",
        "pass",
        _TESTS,
    ),
    Mutant(
        "overlap: a text goes on with the states of another one's token",
        _PASS,
        "for state, row in zip(states.unbind(0), own, strict=True):",
        "for state, row in zip(states.unbind(0), own[1:] + own[:1], strict=True):",
        _TESTS,
    ),
    Mutant(
        "overlap: all cycles share their keys",
        _PASS,
        "own, stride = pool.folded, pool.stride",
        "own, stride = pool.folded, 0",
        _TESTS,
    ),
    Mutant(
        "overlap: a cycle's keys begin one slot early",
        _POOL,
        "part = whole.narrow(2, cycle * stride, stride)",
        "part = whole.narrow(2, max(cycle * stride - 1, 0), stride)",
        _TESTS,
    ),
    Mutant(
        "overlap: siblings see each other",
        _PASS,
        "None if seen.in_line else seen,",
        "None,",
        _TESTS,
    ),
    Mutant(
        "overlap: a guess stands at the place of the token before it",
        _PASS,
        "cache.length - 1 + branches.depths[number]",
        "cache.length",
        _TESTS,
    ),
)
