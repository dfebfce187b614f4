"""Chains that stay where they were drawn until they are decided: the rounds are those of drafts
that come to the host first, id by id. Here both are on a CPU, whose numbers can be compared;
tests/unit/inference/passes/test_fake_cuda.py has the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.drafting.decoders.model import ModelDrafter
from tandem.engine.asks import ReadTokens, Steps, Take, ToHost, Truncation
from tandem.engine.job import Job
from tandem.engine.numbers.decisions import _proposal
from tandem.engine.numbers.home import drafts_of
from tandem.engine.stepper import Stepper
from tandem.errors import EngineFailure
from tandem.inference.decoder import Decoder
from tandem.inference.feed import DrawnToken, Draws, Feed
from tandem.inference.output import PassOutput
from tandem.inference.passes import cuda_graphs, one_call
from tandem.speculation.categorical import Categorical
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence, open_
from target_svc.run import Credit, RunRound, run
from tests.support.decoders import decoder_over
from tests.support.devices.by_operators import by_operators
from tests.support.devices.recording import Recorder
from tests.support.models.tiny import random_llama

# Of the target; drafters may know fewer ids, or more.
VOCAB_SIZE = 40
SAMPLINGS = (
    Sampling(seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_k=12, top_p=0.9, seed=2),
    Sampling(temperature=0.0, seed=3),
    Sampling(seed=4),
)
# Each text's drafts, with texts that draft nothing amid them.
GAMMAS = (3, 4, 1, 2, 0)
ROUNDS = 4

# Of each round: its draft with the rows, the verdict, the text's length, whether it is the last.
Told = list[tuple[Any, ...]]


class Waiter:
    """Stands for the future of a job that nobody cancels."""

    def cancelled(self) -> bool:
        return False


@pytest.fixture(scope="module")
def decoders() -> dict[int, Decoder]:
    """The target by 0, and drafters close to it by the size of their vocabularies."""
    target = random_llama(0, VOCAB_SIZE)
    models = {0: target} | {size: _like(target, size) for size in (30, 40, 50)}
    return {
        key: decoder_over(model, str(key), cache_tokens=1024, engine="torch")
        for key, model in models.items()
    }


def _like(target: PreTrainedModel, size: int) -> PreTrainedModel:
    """A model that agrees with another one in much, on the ids that both have."""
    model = random_llama(size, size)
    own = model.state_dict()
    for name, weights in target.state_dict().items():
        if name == "lm_head.weight":
            weights = weights + 0.2 * torch.randn_like(weights)
        shared = min(len(weights), len(own[name]))
        own[name][:shared] = weights[:shared]
    return model


@pytest.fixture
def texts(decoders: dict[int, Decoder]) -> Iterator[Callable[..., list[Told | BaseException]]]:
    """Makes texts by runs, together: what each one's rounds came to, or what it failed with."""
    reserved: list[tuple[Decoder, Any]] = []

    def make(
        rule: str,
        *,
        on_device: bool,
        vocab_size: int = 40,
        support: int = 16,
        gammas: Sequence[int] = GAMMAS,
        samplings: Sequence[Sampling] = SAMPLINGS,
        drafter: Any = None,
        target: Any = None,
        method: type[ModelDrafter] = ModelDrafter,
    ) -> list[Told | BaseException]:
        scorers = [target or decoders[0], drafter or decoders[vocab_size]]
        made = method(scorers[1], Truncation(0.99, support))
        own = OwnDrafts(made, target_pb2.TargetDrafts(), VOCAB_SIZE, on_device)
        sequences = []
        for i, (sampling, gamma) in enumerate(zip(samplings, gammas, strict=False)):
            prompt = [1 + i, *range(2 + i)]
            # Some meet their end within the rounds, where drafts are cut.
            end = len(prompt) + 5 + 2 * gamma
            request = TargetRequest(sampling, VERIFIERS[rule], end=end)
            sequence = TargetSequence(prompt, request, own=OwnDrafting(list(prompt)))
            small = drafter if isinstance(drafter, Decoder) else decoders[vocab_size]
            for decoder in (decoders[0], small):
                sequence.caches.append(decoder.reserve(40))
                reserved.append((decoder, sequence.caches[-1]))
            sequences.append(sequence)
        jobs = [
            Job(sequence, _rounds(scorers[0], sequence, own, gamma))
            for sequence, gamma in zip(sequences, gammas, strict=False)
        ]
        _play(jobs)
        return [job.error or [_told(each.result) for each in job.reports] for job in jobs]

    yield make
    for decoder, cache in reserved:
        decoder.release(cache)


def _rounds(scorer: Any, sequence: TargetSequence, own: OwnDrafts, gamma: int) -> Steps[None]:
    yield from open_(scorer, sequence, 0)
    credit = Credit(0)
    credit.grant(ROUNDS, DraftSize(gamma))
    yield from run(scorer, sequence, credit, own)


def _told(done: RunRound) -> tuple[Any, ...]:
    decision = done.decision
    draft = decision.draft
    rows = draft.sizes, draft.ids.tolist(), draft.weights.tolist()
    return draft.token_ids, rows, decision.place, decision.next_token, done.length, done.last


def _without_rows(text: Told | BaseException) -> list[tuple[Any, ...]]:
    """What the rounds came to, but for the rows that drafts were drawn from; none of a failure."""
    if isinstance(text, BaseException):
        return []
    return [(tokens, *others) for tokens, _, *others in text]


@torch.inference_mode()
def _play(jobs: Sequence[Job[Any]]) -> None:
    """Run jobs together to their ends."""
    stepper = Stepper(torch.device("cpu"))
    for job in jobs:
        job.done = Waiter()  # type: ignore[assignment]
        job.resume()
    while pending := [job for job in jobs if not job.over]:
        for job in pending:
            if isinstance(job.ask, Take):
                job.chunk = job.ask.left
        stepper.step(pending)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("rule", "vocab_size"), [("block", 40), ("token", 30), ("block", 50)])
def test_texts_are_those_of_the_operators_of_kernels(
    texts: Callable[..., Any],
    rule: str,
    vocab_size: int,
    on_device: bool,
) -> None:
    with by_operators() as asked:
        there = texts(rule, on_device=on_device, vocab_size=vocab_size)
    assert asked["draw"] > 5 < asked["decide"]
    here = texts(rule, on_device=on_device, vocab_size=vocab_size)
    if on_device:  # the rows that kernels drew from stay there
        assert {size for text in there for _, (sizes, *_), *_ in text for size in sizes} == {0}
        there, here = ([_without_rows(text) for text in texts] for texts in (there, here))
    assert there == here


@pytest.mark.parametrize("samplings", [SAMPLINGS, [SAMPLINGS[1], SAMPLINGS[3]]])
def test_texts_are_those_of_chains_that_are_drawn_in_one_replay(
    texts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, samplings: Sequence[Sampling]
) -> None:
    """Together and alone, sampled and greedy."""
    recorder = Recorder()
    monkeypatch.setattr(one_call, "worthwhile", lambda _: True)
    monkeypatch.setattr(cuda_graphs, "capture", recorder)

    def drafter(chains: tuple[float, int] | None) -> Decoder:
        torch.manual_seed(1)
        model = _like(random_llama(0, VOCAB_SIZE), 40)
        options: dict[str, Any] = {"cache_tokens": 1024, "engine": "torch", "chains": chains}
        return decoder_over(model, "small", graph_rows=8, longest=40, **options)

    own, bare = drafter((0.99, 16)), drafter(None)
    gammas = [4] * len(samplings)
    asked: dict[str, Any] = {"on_device": True, "samplings": samplings, "gammas": gammas}
    with by_operators():
        before, there = recorder.replays, texts("block", drafter=own, **asked)
        between, here = recorder.replays, texts("block", drafter=bare, **asked)
    assert there == here
    assert 0 < between - before < recorder.replays - between  # without chains a token each


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_what_is_not_finite_ends_texts_and_drafts_of_the_operators_too(
    texts: Callable[..., Any], decoders: dict[int, Decoder], at: int
) -> None:
    def made() -> Any:
        drafter = Breaking(decoders[40], (at, 1))
        return texts("block", on_device=True, gammas=(3, 3, 3), drafter=drafter)

    with by_operators() as asked:
        there = made()
    assert asked["draw"]
    here = made()
    assert list(map(_failed, there)) == list(map(_failed, here))
    for text in (0, 1, 2) if at > 1 else (0, 2):
        assert _without_rows(there[text]) == _without_rows(here[text]) != []


@pytest.mark.parametrize("rule", ["token", "block", "greedy_block"])
@pytest.mark.parametrize(("vocab_size", "support"), [(40, 16), (30, 0), (50, 16), (50, 0)])
def test_texts_are_those_of_drafts_on_the_host(
    texts: Callable[..., Any], rule: str, vocab_size: int, support: int
) -> None:
    gammas = (3, 4, 1, 2) if VERIFIERS[rule].needs_every_draft else GAMMAS
    size: dict[str, Any] = {"vocab_size": vocab_size, "support": support, "gammas": gammas}
    there = texts(rule, on_device=True, **size)
    assert there == texts(rule, on_device=False, **size)
    rounds = [done for text in there for done in text]
    assert all(len(text) > 1 for text in there)
    kept = [place for _, _, place, *_ in rounds]
    assert min(kept) == 0 < max(kept) - 1  # some are rejected, and some kept


def test_a_batch_on_the_device_is_that_of_the_drafts() -> None:
    """Of steps of several supports, with certain rows; of chains of several lengths, one of which
    ends before a row that was not finite."""
    random = np.random.default_rng(1)
    steps = []
    for support, rows in ((4, 3), (1, 2), (6, 4)):
        ids = torch.tensor(np.stack([random.permutation(9)[:support] for _ in range(rows)]))
        weights = torch.tensor(random.integers(0, 999, (rows, support)))
        weights[:, 0] = 65535
        steps.append(Draws(ids[:, 0].clone(), Categorical(ids, weights)))
    first, second, third = steps
    second.rows.weights[1] = 0
    chains = [
        [DrawnToken(first, 2), DrawnToken(second, 0), DrawnToken(third, 1)],
        [DrawnToken(first, 0)],
        [DrawnToken(third, 3), DrawnToken(second, 0)],
        [DrawnToken(first, 1), DrawnToken(second, 1), DrawnToken(third, 0)],
    ]
    found = _proposal(chains)
    drafts = [draft for draft in drafts_of([ToHost(chain) for chain in chains]) if draft]
    expected = Proposal.from_drafts([draft for draft in drafts if isinstance(draft, Draft)])
    assert found.lengths.tolist() == expected.lengths.tolist() == [3, 1, 2, 1]
    assert found.tokens.equal(expected.tokens)
    for dtype in (torch.float32, torch.float64):
        assert found.dense(9, dtype).equal(expected.dense(9, dtype))


class Breaking:
    """A scorer that computes no distribution at times.

    Attributes:
        passes: so far.

    Args:
        decoder: scores.
        broken: pass, and which of its rows.
    """

    def __init__(self, decoder: Decoder, broken: tuple[int, int]) -> None:
        self._decoder = decoder
        self._broken = broken
        self.vocab_size = decoder.vocab_size
        self.chains = False
        self.passes = -1

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        output = self._decoder.forward(feeds)
        self.passes += 1
        at, row = self._broken
        if self.passes == at:
            output.logits[row, 3] = torch.nan
        return output

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        return None


DRAFTER = "the drafter computed a distribution that is not finite"


def _failed(text: Told | BaseException) -> str:
    return str(text) if isinstance(text, EngineFailure) else ""


# The drafter's first pass takes the prompts in; each of three drafted tokens is a pass.
@pytest.mark.parametrize("rule", ["block", "greedy_block"])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_drafter_that_is_not_finite_ends_its_text_or_its_draft(
    texts: Callable[..., Any], decoders: dict[int, Decoder], rule: str, at: int
) -> None:
    """The first row of a draft ends its text. A later one ends the draft before it, but for a rule
    that is exact at full length alone."""
    gammas = (3, 3, 3)
    sound = texts(rule, on_device=True, gammas=gammas)
    here, there = (
        texts(rule, on_device=on, gammas=gammas, drafter=Breaking(decoders[40], (at, 1)))
        for on in (False, True)
    )
    assert list(map(_failed, there)) == list(map(_failed, here))
    assert [there[0], there[2]] == [here[0], here[2]]
    # Its passes have a sequence more: a weight may be rounded the other way.
    for text in (0, 2):
        assert _without_rows(there[text]) == _without_rows(sound[text])
    if at == 1 or VERIFIERS[rule].needs_every_draft:
        assert _failed(there[1]) == DRAFTER
    else:
        assert there[1] == here[1]
        short = (at - 1) // 3
        assert len(there[1][short][0]) == (at - 1) % 3


def test_a_target_that_is_not_finite_ends_its_text(
    texts: Callable[..., Any], decoders: dict[int, Decoder]
) -> None:
    """Its second pass has the drafts of three texts."""
    made = texts("block", on_device=True, gammas=(3, 3, 3), target=Breaking(decoders[0], (1, 5)))
    told = [_failed(text) for text in made]
    assert told == ["", "the target computed a distribution that is not finite", ""]


class GoingOn(ModelDrafter):
    """Asks for more when its chain is at the host."""

    def draft(self, *args: Any) -> Steps[Draft]:
        draft = yield from super().draft(*args)
        yield ReadTokens([])
        return draft


class Withdrawing(ModelDrafter):
    """Drafts something else than what it brought to the host."""

    def draft(self, *args: Any) -> Steps[Draft]:
        yield from super().draft(*args)
        return Draft.certain([1])


@pytest.mark.parametrize("method", [GoingOn, Withdrawing])
def test_a_method_ends_with_the_chain_that_it_brings(
    texts: Callable[..., Any], method: type[ModelDrafter]
) -> None:
    """Or the text would go on by a draft that was not decided."""
    for failed in texts("block", on_device=True, gammas=(2,), method=method):
        assert isinstance(failed, RuntimeError)
