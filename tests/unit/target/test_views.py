"""A part of the target drafts over the target's own weights and KV cache: its drafts and texts are
those of a copy, and rows that it computed are not computed again."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tandem.drafting.decoders.model import ModelRecipe
from tandem.drafting.decoders.tree import TreeRecipe
from tandem.drafting.drafter import OF_TARGET, Recipe
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Steps, Truncation
from tandem.engine.job import Job
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed, Resumed
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.viewed import ViewedCache
from tandem.inference.loading.partial import ModelPart, take_part
from tandem.inference.model import Model
from tandem.inference.views.part import ModelView
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence, open_
from target_svc.run import Credit, RunRound, run
from tests.support.decoders import decoder_over
from tests.support.jobs import play

VOCAB_SIZE, LAYERS, EXIT = 24, 4, 2
SAMPLINGS = (
    Sampling(seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_k=12, top_p=0.9, seed=2),
)
ROUNDS, THREE = 6, DraftSize(3)
CHAIN, TREE = ModelRecipe(), TreeRecipe(acceptance=(0.6, 0.3, 0.1), max_nodes=8)
# Of the table: a recipe that is made of others is whole only there.
CASCADE = METHODS["cascade"].model_validate({"tokens": 2})
HORIZONTAL = METHODS["horizontal"].model_validate(
    {"parts": [{"method": "lookup"}, {"method": "model"}], "tokens": [2]}
)
# Its rows run out where two tokens are left: drawn nodes fall away, which are computed already.
FEW = (Sampling(top_k=2, seed=4), Sampling(top_p=0.6, seed=5), Sampling(temperature=0.5, seed=6))


def _model() -> PreTrainedModel:
    """A target whose first layers say much of what all of them say."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers[EXIT:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    return model


class Counted:
    """A scorer that notes its passes.

    Attributes:
        fed: of each pass: the feeds' tokens, and those that were not computed from the first layer.
    """

    def __init__(self, model: Model) -> None:
        self._model, self.vocab_size, self.chains = model, model.vocab_size, False
        self.fed: list[list[tuple[int, int]]] = []

    def forward(self, feeds: Sequence[Feed]) -> Any:
        known = [0 if one.resumed is None else one.resumed.count for one in feeds]
        self.fed.append([(len(one.token_ids), n) for one, n in zip(feeds, known, strict=True)])
        return self._model.forward(feeds)

    def draw_on(self, feeds: Any, asked: Any) -> None:
        return None


@pytest.fixture(scope="module")
def skip(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("skip") / "skip.json"
    path.write_text(json.dumps({"attention": [2], "mlp": [1, 3]}))
    return str(path)


@pytest.fixture(scope="module")
def target(skip: str) -> Decoder:
    parts = (ModelPart(exit=EXIT), ModelPart(skip=skip))
    return decoder_over(
        _model(), "target", cache_tokens=1024, engine="torch", trees=True, views=parts
    )


@pytest.fixture(scope="module")
def copied() -> Decoder:
    model = _model()
    take_part(model, ModelPart(exit=EXIT))
    return decoder_over(model, "part", cache_tokens=1024, engine="torch", trees=True)


def texts(
    target: Decoder,
    drafting: Model,
    recipe: Recipe,
    *,
    rule: str = "block",
    exit_: int = 0,
    size: DraftSize = THREE,
    samplings: Sequence[Sampling] = SAMPLINGS,
    plain: Sequence[int] = (),
    together: bool = True,
) -> tuple[list[list[RunRound]], Counted, Counted]:
    """Rounds of texts, and what the target's and the drafter's passes were fed; the rounds whose
    numbers are `plain` have no draft."""
    scorers = Counted(target), Counted(drafting)
    made = recipe.make([scorers[1]], Truncation(0.999, 0))
    own = OwnDrafts(made, target_pb2.TargetDrafts(), VOCAB_SIZE, exit=exit_)
    jobs = []
    for i, sampling in enumerate(samplings):
        prompt = [1 + i, *range(3 + i)]
        asked = TargetRequest(sampling, VERIFIERS[rule], size.nodes, end=len(prompt) + 200)
        sequence = TargetSequence(prompt, asked, own=OwnDrafting(list(prompt)))
        sequence.caches = [one.reserve(250, size.nodes) for one in (target, drafting)]
        jobs.append(Job(sequence, _rounds(scorers[0], sequence, own, size, plain)))
    for batch in [jobs] if together else [[job] for job in jobs]:
        play(batch)
    for job in jobs:
        for model, cache in zip((target, drafting), job.sequence.caches, strict=True):
            model.release(cache)
        assert job.error is None, job.error
    return [[each.result for each in job.reports] for job in jobs], *scorers


def _rounds(
    scorer: Any,
    sequence: TargetSequence,
    own: OwnDrafts,
    size: DraftSize,
    plain: Sequence[int],
    rounds: int = ROUNDS,
) -> Steps[None]:
    yield from open_(scorer, sequence, 0)
    credit = Credit(0)
    for number in range(1, rounds + 1):
        credit.grant(1, DraftSize(0) if number in plain else size)
    yield from run(scorer, sequence, credit, own)


def told(rounds: Sequence[RunRound]) -> list[tuple[Any, ...]]:
    """What the rounds drafted and decided."""
    decisions = [(one.decision, one.decision.draft) for one in rounds]
    return [(draft.token_ids, draft.parents, one.place, one.next_token) for one, draft in decisions]


@pytest.mark.parametrize(
    ("recipe", "rule", "size", "plain", "together"),
    [
        (CHAIN, "block", DraftSize(3), (), True),
        (CHAIN, "block", DraftSize(3), (2, 4, 5), False),
        (CHAIN, "greedy_block", DraftSize(3), (), True),
        (TREE, "token", DraftSize(3, 8), (2, 4, 5), True),
        (TREE, "block", DraftSize(4, 8), (), False),
        (CASCADE, "block", DraftSize(5), (2, 4, 5), True),
        (HORIZONTAL, "block", DraftSize(5), (2, 4, 5), True),
    ],
)
def test_texts_are_those_of_a_copy(
    target: Decoder,
    copied: Decoder,
    recipe: Recipe,
    rule: str,
    size: DraftSize,
    plain: Sequence[int],
    together: bool,
) -> None:
    how: dict[str, Any] = {"rule": rule, "size": size, "plain": plain, "together": together}
    there, *_ = texts(target, copied, recipe, **how)
    view = ModelView(target, ModelPart(exit=EXIT))
    for exit_ in (0, EXIT):
        here, passes, _ = texts(target, view, recipe, exit_=exit_, **how)
        assert [told(text) for text in here] == [told(text) for text in there]
        resumed = sum(known for one in passes.fed for _, known in one)
        assert bool(resumed) is bool(exit_)
    places = [one.decision.num_accepted for text in there for one in text]
    assert min(places) == 0 < max(places)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("size", [DraftSize(2, 16), DraftSize(3, 16)])
def test_nodes_that_fall_away_leave_no_state(
    target: Decoder, copied: Decoder, rule: str, size: DraftSize
) -> None:
    """Where the row of a place has no further token, what was drawn there is not sent, and what was
    computed after it is nobody's."""
    how: dict[str, Any] = {"rule": rule, "size": size, "samplings": FEW}
    there, *_ = texts(target, copied, TreeRecipe(), **how)
    view = ModelView(target, ModelPart(exit=EXIT))
    here, passes, drafts = texts(target, view, TreeRecipe(), exit_=EXIT, **how)
    assert [told(text) for text in here] == [told(text) for text in there]
    computed = sum(count for one in drafts.fed for count, _ in one)
    assert 0 < sum(known for one in passes.fed for _, known in one) < computed


def test_the_prompt_is_computed_once_and_only_the_upper_layers_of_drafted_rows(
    target: Decoder,
) -> None:
    view = ModelView(target, ModelPart(exit=EXIT))
    (rounds,), passes, drafts = texts(target, view, CHAIN, exit_=EXIT, samplings=SAMPLINGS[:1])
    assert passes.fed == [[(4, 0)], *[[(4, 3)]] * ROUNDS]
    assert drafts.fed == [[(1, 0)]] * 3 * ROUNDS
    assert len(rounds) == ROUNDS


def test_a_tree_is_gone_on_with_where_it_stopped(target: Decoder) -> None:
    view = ModelView(target, ModelPart(exit=EXIT))
    size = DraftSize(3, 8)
    (rounds,), passes, drafts = texts(
        target, view, TREE, exit_=EXIT, size=size, samplings=SAMPLINGS[:1]
    )
    computed = [
        sum(count for ((count, _),) in drafts.fed[i : i + 3]) for i in range(0, len(drafts.fed), 3)
    ]
    assert [one for (one,) in passes.fed[1:]] == [
        (1 + len(each.decision.draft), known) for each, known in zip(rounds, computed, strict=True)
    ]
    # Some nodes stand elsewhere in the pass than in the draft.
    assert any(each.decision.draft.parents for each in rounds)


def test_rows_that_are_resumed_are_those_of_a_whole_pass(target: Decoder) -> None:
    """Within 1e-4, after rejected rows and beside texts that resume nothing."""
    view = ModelView(target, ModelPart(exit=EXIT))
    first, second = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]
    with torch.inference_mode():
        for text, drafts in ((first, [[7, 8, 9], [7, 2, 6]]), (second, [[1, 1, 2], [3, 5, 8]])):
            cache, other, whole = (_reserved(target) for _ in range(3))
            for one in (cache, other, whole):
                target.forward([Feed(one, text[:-1], 0)])
            shown = ViewedCache()
            shown.show(cache)
            last = text[-1]
            for draft in drafts:
                fed = [last, *draft]
                for token_id in fed[:-1]:
                    view.forward([Feed(shown, [token_id], 1)])
                resumed = _resumed(shown, len(draft))
                rows = target.forward(
                    [Feed(other, fed, 4), Feed(cache, fed, 4, resumed=resumed)]
                ).logits
                expected = target.forward([Feed(whole, fed, 4)]).logits
                assert torch.allclose(rows[:4], expected, atol=1e-4)
                assert torch.allclose(rows[4:], expected, atol=1e-4)
                for one in (cache, other, whole):  # the last two are rejected
                    one.rollback(one.length - 2)
                shown.keep(())
                last = 11
            for one in (cache, other, whole):
                target.release(one)


def _reserved(target: Decoder) -> SequenceCache:
    cache = target.reserve(40)
    assert cache is not None
    return cache


def _resumed(shown: ViewedCache, count: int) -> Resumed | None:
    return Resumed(EXIT, shown.exit_states).first(count)


def test_a_part_has_the_weights_of_the_whole(target: Decoder, skip: str) -> None:
    """Packed or not, each matrix is one object; and the pool is one."""
    backend = target._backends.current
    whole: Any = backend.compute
    for part, kept in ((ModelPart(exit=EXIT), range(EXIT)), (ModelPart(skip=skip), range(LAYERS))):
        view = backend.view(part)
        steps: Any = view.compute
        (own,) = [
            cell.cell_contents for cell in steps.__closure__ if isinstance(cell.cell_contents, list)
        ]
        assert view.pool is backend.pool
        assert view.busy is backend.busy
        assert [step.number - 1 for step in own] == list(kept)
        for step in own:
            of = whole.blocks[step.number - 1]
            assert all(
                mine is theirs
                for mine, theirs in zip(step.layer.children(), of.children(), strict=True)
            )


def test_a_part_by_openvino_has_a_graph_of_its_own_over_the_same_blocks(skip: str) -> None:
    """Its rows are torch's; rows that it computed are computed again by the whole."""
    parts = ModelPart(exit=EXIT), ModelPart(skip=skip)
    model = _model()
    there, here = (
        decoder_over(copy.deepcopy(model), "t", cache_tokens=512, engine=engine, views=parts)
        for engine in ("torch", "openvino")
    )
    assert here.engine == "openvino"
    with torch.inference_mode():
        for part in parts:
            rows = []
            for decoder in (there, here):
                cache, shown, view = _reserved(decoder), ViewedCache(), ModelView(decoder, part)
                decoder.forward([Feed(cache, [3, 1, 4], 0)])
                shown.show(cache)
                rows.append([view.forward([Feed(shown, [5], 1)]).logits])
                rows[-1].append(view.forward([Feed(shown, [9, 2], 2, [0, 0])]).logits)
                rows[-1].append(view.forward([Feed(shown, [6], 1, [2])]).logits)
                rows[-1].append(decoder.forward([Feed(cache, [5, 9, 2], 3)]).logits)
                decoder.release(cache)
            for one, other in zip(*rows, strict=True):
                assert torch.allclose(one, other, atol=1e-4)
            assert not shown.exit_states


@pytest.mark.parametrize("recipe", [CHAIN, TREE])
def test_a_part_without_some_sublayers_drafts_and_all_rows_are_computed(
    target: Decoder, skip: str, recipe: Recipe
) -> None:
    view = ModelView(target, ModelPart(skip=skip))
    size = DraftSize(3, 8) if recipe is TREE else DraftSize(3)
    found, passes, drafts = texts(target, view, recipe, size=size, plain=(3,))
    assert not any(known for one in passes.fed for _, known in one)
    assert drafts.fed
    greedy = found[1]
    plain, *_ = texts(target, view, recipe, size=size, plain=range(ROUNDS + 1))
    tokens = [one for each in greedy for one in each.decision.emitted]
    assert tokens[:ROUNDS] == [one for each in plain[1] for one in each.decision.emitted]
    assert any(one.decision.num_accepted for one in greedy)


def test_a_model_named_as_a_part_of_the_target() -> None:
    recipe = ModelRecipe(model=OF_TARGET, exit=2)
    assert recipe.checkpoints[0].path == OF_TARGET
    assert json.loads(recipe.model_dump_json())["model"] == OF_TARGET
