"""Mistakes in the product that `make test` must notice: `make mutants`.

    python -m tests.mutants [--list] [name ...]

A mutant is one wrong place in a copy of the repository. The tests named beside it must pass without
the mutant and fail with it. All of them belong to `make test`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.mutants.drafting import OF_PHRASES, OF_VIEWS
from tests.support.mutants.learning import OF_DISTILLATION, OF_ONLINE, OF_ONLINE_HEADS
from tests.support.mutants.overlap import OF_OVERLAP
from tests.support.mutants.serving import (
    OF_BLOCKS,
    OF_CHAINS,
    OF_GROWING,
    OF_ROUTING,
    Mutant,
)
from tests.support.repository import ROOT

_LONGEST = 900  # seconds of one mutant's tests, so that one that makes them wait for ever ends


_RULES = "tests/unit/verification/test_verifiers_exact.py"
_TREES = "tests/unit/verification/test_tree_rules.py"
_KERNELS = "tests/unit/verification/test_kernels.py"
_STATE = "tests/unit/verification/test_kernels_state.py"
_TREE_KERNELS = "tests/unit/verification/test_kernels_trees.py"
_DRAWS = "tests/unit/engine/numbers/test_draws.py"
_DRAWN_LAW = "tests/unit/engine/numbers/test_drawn_law.py"
_NUMBERS = "tests/unit/speculation/test_randomness.py"
_RUN_LAW = "tests/unit/target/test_run_law.py"
_SUCCESSION = "tests/service/replicas/test_succession.py"
_GENERATE = "tests/service/requests/test_generate.py"
_LAWS = "tests/system/serving/test_exactness.py"
_TREE_LAWS = "tests/system/serving/test_trees.py"

_BLOCK = "tandem/verification/block.py"
_TOKEN = "tandem/verification/token.py"
_GREEDY = "tandem/verification/greedy_block.py"
_CHAIN_KERNELS = "tandem/verification/kernels/chains.py"
_FIRST_FAILURE = "from tandem.verification.chain import up_to_first_failure as first\n\n        "

MUTANTS = (
    # Rules.
    Mutant(
        "block: the first failure counts",
        _BLOCK,
        "return last_success(passed)",
        _FIRST_FAILURE + "return first(passed)",
        (_RULES,),
    ),
    Mutant(
        "block: the chance of a row forgets the joint",
        _BLOCK,
        "rejected = residual + (1 - joint)",
        "rejected = residual + 0 * joint + 1",
        (_RULES,),
    ),
    Mutant(
        "block: the residual forgets the joint",
        _BLOCK,
        "return correction((joint * p).sub_(q), p, view.kept_all(num_accepted))",
        "return correction(p - q, p, view.kept_all(num_accepted))",
        (_RULES,),
    ),
    Mutant(
        "token: a rejected token is replaced by one of p",
        _TOKEN,
        "return correction(p - q, p, view.kept_all(num_accepted))",
        "return correction(p, p, view.kept_all(num_accepted))",
        (_RULES,),
    ),
    Mutant(
        "token: kept with 2 p / q",
        _TOKEN,
        "torch.where(view.drafted, view.ratios.clamp(max=1), 0.0)",
        "torch.where(view.drafted, (2 * view.ratios).clamp(max=1), 0.0)",
        (_RULES,),
    ),
    Mutant(
        "greedy_block: levels end a position early",
        _GREEDY,
        "torch.where(remaining[:, j : j + 1] > 0, modified, stages[-1])",
        "torch.where(remaining[:, j : j + 1] > 1, modified, stages[-1])",
        (_RULES,),
    ),
    Mutant(
        "greedy_block: levels are lost when they are packed",
        _GREEDY,
        "return _stack(carry, gamma - 1, device).flatten(1)",
        "return _stack(carry, gamma - 1, device).flatten(1) * 0",
        (_KERNELS, _STATE),
    ),
    Mutant(
        "greedy_block: levels are lost when they are unpacked",
        _GREEDY,
        "return list(packed.view(len(packed), 2, packed.shape[1] // 2))",
        "return list((packed * 0).view(len(packed), 2, packed.shape[1] // 2))",
        (_KERNELS, _STATE),
    ),
    Mutant(
        "trees: a sibling is judged as if none was rejected before it",
        "tandem/verification/recursive.py",
        "law = law[siblings.before] if rank else p",
        "law = p",
        (_TREES,),
    ),
    Mutant(
        "trees: a parent is kept as if no child was judged before it",
        "tandem/verification/traversal.py",
        "after[batch, place] = chance",
        "after[batch, place] = arrived[batch, place]",
        (_TREES,),
    ),
    Mutant(
        "spectr: the residual of one draw",
        "tandem/verification/spectr.py",
        "weights = (p - common * _accepted(beta, draws) / beta.clamp(min=1e-30)).clamp_(min=0)",
        "weights = (p - common).clamp_(min=0)",
        (_TREES,),
    ),
    Mutant(
        "gbv: the best chain's law is the drafter's",
        "tandem/verification/gbv.py",
        "row = q * total.gather(1, rank)",
        "row = q",
        (_TREES,),
    ),
    # Their kernels.
    Mutant(
        "kernel of block: the first failure counts",
        _CHAIN_KERNELS,
        "if uniforms[i - 1] < chance:",
        "if kept == i - 1 and uniforms[i - 1] < chance:",
        (_KERNELS,),
    ),
    Mutant(
        "kernel of block: the residual forgets the joint",
        _CHAIN_KERNELS,
        "out[1] = _follow(p, kept, joints[kept], tokens, sizes, ids, weights, last, row)",
        "out[1] = _follow(p, kept, _ONE, tokens, sizes, ids, weights, last, row)",
        (_KERNELS,),
    ),
    Mutant(
        "kernel of token: going on after a failure",
        _CHAIN_KERNELS,
        "going = going and uniforms[i] < min(ratio, _ONE)",
        "going = uniforms[i] < min(ratio, _ONE)",
        (_KERNELS,),
    ),
    Mutant(
        "kernel of greedy_block: levels end a position early",
        "tandem/verification/kernels/greedy_block.py",
        "if counts[j] > i:",
        "if counts[j] > i + 1:",
        (_KERNELS, _STATE),
    ),
    Mutant(
        "kernel of trees: siblings with replacement",
        "tandem/verification/kernels/trees.py",
        "if parents[earlier] == parents[node]:",
        "if parents[earlier] > parents[node]:",
        (_TREE_KERNELS,),
    ),
    # Draws and their numbers.
    Mutant(
        "numbers: one for all purposes",
        "tandem/speculation/randomness.py",
        "self._purpose = purpose | part << 8",
        "self._purpose = part << 8",
        (_NUMBERS,),
    ),
    Mutant(
        "numbers: one for all rounds",
        "tandem/speculation/randomness.py",
        "np.arange(rounds, dtype=np.uint64) + np.uint64(round_)",
        "np.zeros(rounds, dtype=np.uint64)",
        (_NUMBERS,),
    ),
    Mutant(
        "draws: one number for all nodes",
        "tandem/engine/numbers/draws.py",
        "values[row, :count] = numbers[node : node + count]",
        "values[row, :count] = numbers[:count]",
        (_DRAWS, _LAWS),
    ),
    Mutant(
        "draws: one number for all ranks",
        "tandem/engine/numbers/draws.py",
        "values[row, :count] = numbers[node : node + count]",
        "values[row, :count] = numbers[node : node + 1]",
        (_DRAWN_LAW,),
    ),
    Mutant(
        "draws: tokens from bfloat16 rows, and float32 rows are sent",
        "tandem/engine/numbers/draws.py",
        "return Draws(tokens, Categorical(ids, weights))",
        "rough = Categorical.quantize(probs.bfloat16().float(), mass, support)\n"
        "        return Draws(rough.draw(torch.from_numpy(digits)), Categorical(ids, weights))",
        (_DRAWN_LAW,),
    ),
    Mutant(
        "draws: tokens from bfloat16 rows, without the kernel",
        "tandem/engine/numbers/draws.py",
        "return Draws(drawn.draw(there), drawn)",
        "rough = Categorical.quantize(probs.bfloat16().float(), mass, support)\n"
        "    return Draws(rough.draw(there), drawn)",
        (_DRAWN_LAW,),
    ),
    Mutant(
        "draws: siblings with replacement",
        "tandem/engine/numbers/draws.py",
        "left = left.masked_fill(distinct & (rows.ids == tokens[-1][:, None]), 0)",
        "left = left + 0",
        (_DRAWS, _TREE_LAWS),
    ),
    Mutant(
        "draws: off by one weight",
        "tandem/speculation/sampler.py",
        "if reached > point:",
        "if reached >= point:",
        (_KERNELS,),
    ),
    Mutant(
        "draws: off by one weight, without the kernel",
        "tandem/speculation/categorical.py",
        "torch.searchsorted(sums, point[:, None], right=True)",
        "torch.searchsorted(sums, point[:, None], right=False)",
        ("tests/unit/speculation/test_draft.py",),
    ),
    Mutant(
        "draws: ids beyond the target's vocabulary",
        "tandem/engine/numbers/draws.py",
        "sizes = [min(ask.vocab_size, vocab_size) for ask in asks]",
        "sizes = [vocab_size for ask in asks]",
        (_DRAWS,),
    ),
    Mutant(
        "draws: every text's sampling is the first one's",
        "tandem/engine/numbers/draws.py",
        '    """A draw a row."""\n    probs = process(logits, [ask.sampling for ask in each])',
        '    """A draw a row."""\n    probs = process(logits, [each[0].sampling for _ in each])',
        (_DRAWS,),
    ),
    # Rounds and messages.
    Mutant(
        "target: one number keeps and corrects",
        "tandem/speculation/randomness.py",
        "RandomNumbers(seed, Purpose.RESIDUAL, uniforms, part)",
        "RandomNumbers(seed, Purpose.ACCEPT, uniforms, part)",
        ("tests/unit/target/test_round_numbers.py",),
    ),
    Mutant(
        "cascade: one number keeps and corrects",
        "tandem/speculation/randomness.py",
        "RandomNumbers(seed, Purpose.RESIDUAL, uniforms, part)",
        "RandomNumbers(seed, Purpose.ACCEPT, uniforms, part)",
        ("tests/unit/drafting/composed/test_cascades.py",),
    ),
    Mutant(
        "orchestrator: texts without a seed share one",
        "orchestrator/front/validation.py",
        "return secrets.randbits(64)",
        "return 0",
        ("tests/unit/orchestrator/front/test_bodies.py",),
    ),
    Mutant(
        "target: the cache keeps a rejected token",
        "target_svc/round.py",
        "cache.rollback(sequence.length + decision.num_accepted)",
        "cache.rollback(sequence.length + decision.num_accepted + 1)",
        (_RUN_LAW, _LAWS, _GENERATE),
    ),
    Mutant(
        "target: a tree's parents are off by one",
        "target_svc/round.py",
        "parents = [places[draft.parents[place - 1]] for place in computed]",
        "parents = [places[max(draft.parents[place - 1] - 1, 0)] for place in computed]",
        (_TREE_LAWS,),
    ),
    Mutant(
        "target: its own drafter is not told the last token",
        "target_svc/own_drafting.py",
        "self.news += decision.emitted",
        "self.news += decision.emitted[:-1]",
        (_RUN_LAW,),
    ),
    Mutant(
        "target: the rounds of a run share their numbers",
        "target_svc/run.py",
        "plain_round(scorer, sequence, round_, wanted, overlap)",
        "plain_round(scorer, sequence, 1, wanted, overlap)",
        ("tests/service/streams/test_runs.py",),
    ),
    Mutant(
        "target: a verdict's levels are not sent",
        "target_svc/messages.py",
        "    if not levels:\n        return None\n    return common_pb2.VerifierCarry(",
        "    if levels:\n        return None\n    return common_pb2.VerifierCarry(",
        (_SUCCESSION, _LAWS),
    ),
    Mutant(
        "orchestrator: a lost target's levels are forgotten",
        "orchestrator/text/target_failover.py",
        "self._carry = decided.carry",
        "self._carry = None",
        (_SUCCESSION,),
    ),
    Mutant(
        "orchestrator: a lost round's numbers are used again",
        "orchestrator/text/target_failover.py",
        "            if not resumes:\n                self.round += 1\n",
        "",
        (_SUCCESSION,),
    ),
    Mutant(
        "target: each text gets the first text's predictions",
        "tandem/engine/numbers/feedback.py",
        "own.rows, own.first = told, first",
        "own.rows, own.first = told, 0",
        ("tests/unit/engine/test_predictions.py",),
    ),
    Mutant(
        "target: what its own drafter wanted to know is sent",
        "target_svc/round.py",
        "if wanted is not None and wanted.on_device:",
        "if wanted is None:",
        ("tests/service/feedback/test_predictions.py",),
    ),
    Mutant(
        "target: log probabilities of merged chains are taken by place",
        "target_svc/round.py",
        "of = [rows[place] for place in places]",
        "of = list(places)",
        ("tests/unit/target/test_log_prob_rows.py",),
    ),
    Mutant(
        "drafter: the threshold is lost where a prepared draft is taken",
        "tandem/drafting/ahead/forks.py",
        "sequence.threshold = behind.threshold",
        "pass",
        ("tests/unit/drafting/ahead/test_same_text.py",),
    ),
    Mutant(
        "drafter: a layer with attention alone shares its KV slot with the next",
        "tandem/inference/loading/partial.py",
        "            attentions += 1\n",
        "            attentions += computes\n",
        ("tests/unit/inference/loading/test_partial.py",),
    ),
    *OF_BLOCKS,
    Mutant(
        "orchestrator: numbers of rounds that were asked for ahead are used again",
        "orchestrator/text/target_failover.py",
        "self.round += self.ahead",
        "self.round += 0",
        ("tests/service/requests/test_plain_runs.py",),
    ),
    Mutant(
        "orchestrator: what was emitted is told twice",
        "orchestrator/text/session.py",
        "self._drafter.tell(emitted, decided.feedback)",
        "self._drafter.tell(2 * emitted, decided.feedback)",
        (_GENERATE,),
    ),
    Mutant(
        "orchestrator: a verdict of another round is taken",
        "tandem/peers/grpc/verify_call.py",
        'expect("verdict.round", verdict.round, round_, round_)',
        'expect("verdict.round", verdict.round, 0, 2**63)',
        ("tests/service/requests/test_contract.py",),
    ),
    Mutant(
        "orchestrator: text after a stop string is sent",
        "orchestrator/text/stop_strings.py",
        'released, self._held = self._held[:at], ""',
        'released, self._held = self._held, ""',
        ("tests/service/http/test_completions.py",),
    ),
    *OF_ROUTING,
    *OF_CHAINS,
    *OF_GROWING,
    *OF_PHRASES,
    *OF_VIEWS,
    *OF_OVERLAP,
    *OF_DISTILLATION,
    *OF_ONLINE,
    *OF_ONLINE_HEADS,
)


def _copy(folder: Path) -> None:
    """The files that git knows of or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _pytest(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit code and the last line that says something; up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *tests], cwd=folder, capture_output=True, text=True, timeout=_LONGEST
    )
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ran.returncode, (failed or ran.stdout.strip().splitlines() or [ran.stderr[-500:]])[-1]


def _caught(folder: Path, mutant: Mutant) -> bool:
    path = folder / mutant.file
    right = path.read_text()
    path.write_text(right.replace(mutant.old, mutant.new))
    try:
        code, said = _pytest(folder, mutant.tests)
    except subprocess.TimeoutExpired:
        code, said = -1, f"its tests did not end in {_LONGEST} s"
    finally:
        path.write_text(right)
    # 1: tests failed. A mutant that cannot be imported (2) shows nothing.
    verdict = {0: "MISSED", 1: "caught"}.get(code, "BROKEN")
    print(f"{verdict}  {mutant.name}\n        {said}", flush=True)
    return code == 1


def main() -> None:
    """See above; exit code 1 if a mutant was not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("name", nargs="*", help="words of the mutants to run; all without any")
    chosen = parser.parse_args()
    mutants = [each for each in MUTANTS if all(word in each.name for word in chosen.name)]
    if chosen.list or not mutants:
        print(*(f"{each.name}: {each.file}" for each in mutants or MUTANTS), sep="\n")
        sys.exit(not mutants)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-mutants-") as name:
        folder = Path(name)
        _copy(folder)
        print("the tests without mutants ...", flush=True)
        code, said = _pytest(folder, sorted({file for each in mutants for file in each.tests}))
        print(f"        {said}", flush=True)
        if code:
            sys.exit("they fail without a mutant too, so that they would show nothing")
        caught = sum([_caught(folder, mutant) for mutant in mutants])
    minutes = (time.monotonic() - started) / 60
    print(f"{caught} of {len(mutants)} mutants were caught; {minutes:.0f} minutes")
    sys.exit(caught < len(mutants))


if __name__ == "__main__":
    main()
