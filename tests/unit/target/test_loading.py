"""Drafts of a target's own: what is wrong with them is one sentence at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.decoders.model import ModelRecipe
from tandem.engine.asks import Truncation
from tandem.engine.schedule import BatchLimits
from tandem.errors import StartupError
from tandem.inference import decoder as decoders
from tandem.inference.kv import size
from tandem.inference.kv.size import Room
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.views.few_keys import positions_of
from tandem.lengths import ANY_LENGTH
from tandem.serving.drafting import load_models
from tandem.serving.model import PREFILL_SHARES, options_of
from target_svc.loading import kept_for_views, own_recipe, share_of_target
from target_svc.servicer import TargetServicer
from target_svc.settings import TargetSettings
from tests.support.models.heads import save_random_head
from tests.support.models.tiny import VOCAB_SIZE, save_random_llama


def loaded(pair: tuple[Path, Path], **settings: Any) -> Any:
    chosen: dict[str, Any] = {"model": str(pair[1]), "max_length": 64, "max_sequences": 2}
    return TargetServicer(TargetSettings(**(chosen | settings)))._load()


@pytest.mark.parametrize(
    ("settings", "model", "sentence"),
    [
        ({"drafts": "nothing"}, "", "the recipe nothing is neither built in"),
        ({"drafts": "model"}, "is/not/there", "is/not/there"),
        ({"drafts": "tree", "max_nodes": 0}, "", "takes chains alone; raise MAX_NODES"),
    ],
)
def test_a_bad_recipe_is_named(
    random_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    model: str,
    sentence: str,
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", model or str(random_pair[0]))
    with pytest.raises(StartupError) as caught:
        loaded(random_pair, **settings)
    assert sentence in str(caught.value)


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of four layers, in the place of a pair."""
    folder = tmp_path_factory.mktemp("deep")
    save_random_llama(folder, 4, layers=4)
    return folder, folder


_NO_DRAFTER = "a part of a target, which drafts inside of it"


@pytest.mark.parametrize(
    ("settings", "own", "sentence"),
    [
        ({}, {}, "'@target' needs exit, skip or kv, of a method that"),
        ({}, {"EXIT": "5"}, "exit = 5: the model has 4 layers"),
        (
            {},
            {"EXIT": "4"},
            "leaves nothing out drafts no faster than the target verifies: it has 4",
        ),
        ({}, {"EXIT": "2", "DTYPE": "bfloat16"}, "DTYPE=bfloat16: a part of the target has the"),
        ({"engine": "openvino"}, {"EXIT": "9"}, "exit = 9: the model has 4 layers"),
        ({"drafts": "cascade"}, {"EXIT": "2"}, "of a method that is made of others in a recipe's"),
        ({}, {"EXIT": "2", "ADAPTER": "there"}, "set TANDEM_TARGET_ADAPTER in place of"),
        ({"drafts": "forest"}, {"EXIT": "2"}, "one model at most may be '@target'"),
        ({"drafts": "medusa"}, {}, "a head is no part of a target: name its own"),
        (
            {},
            {"EXIT": "2", "ONLINE": "20"},
            "a target that drafts does not learn; unset it",
        ),
        ({"draft_device": "cuda"}, {"EXIT": "2"}, "DRAFT_DEVICE: a part of the target computes"),
        ({"engine": "vllm"}, {"EXIT": "2"}, "ENGINE=vllm has no part of a target that drafts"),
    ],
)
def test_a_part_of_the_target_that_cannot_draft_is_refused(
    deep_target: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    own: dict[str, str],
    sentence: str,
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", "@target")
    for name, value in own.items():
        monkeypatch.setenv(f"TANDEM_DRAFTER_{name}", value)
    with pytest.raises(StartupError) as caught:
        loaded(deep_target, **({"drafts": "model"} | settings))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"overlap": "4"}, " has 4 layers, and some have to be left behind the exit"),
        (
            {"overlap": "cycles"},
            " uses each of its 4 layers once; give the number of an exit's layers",
        ),
        ({"overlap": "2", "engine": "openvino"}, "ENGINE=openvino computes whole passes alone"),
        ({"overlap": "2", "engine": "vllm"}, "ENGINE=vllm computes whole passes alone"),
        ({"overlap_guesses": 2}, "TANDEM_TARGET_OVERLAP_GUESSES: only with the number of an exit"),
        ({"overlap": "cycles", "overlap_pipelines": 2}, "TANDEM_TARGET_OVERLAP_PIPELINES: only"),
        (
            {"overlap": "2", "overlap_pipelines": 2, "threads": 1},
            "OVERLAP_PIPELINES: two groups of layers need a thread each; set THREADS to 2",
        ),
    ],
)
def test_layers_that_cannot_overlap_are_named(
    deep_target: tuple[Path, Path], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(StartupError) as caught:
        loaded(deep_target, **settings)
    assert sentence in str(caught.value)
    assert "OVERLAP" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_architecture_has_no_layers_that_overlap(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="has no layers like Llama's, of the kinds llama"):
        loaded((tmp_path, tmp_path), overlap="2")


_FEW = 'model = "@target"\nkv = {kind = "chunks", budget = 48, sink = 4, recent = 8, chunk = 4}\n'
_FOREST = 'method = "forest"\n[[parts]]\nmethod = "tree"\n[[parts]]\nmethod = "model"\n'


@pytest.mark.parametrize(
    ("recipe", "settings", "sentence"),
    [
        (f'method = "model"\n{_FEW}exit = 2\n', {}, "kv of '@target' goes with neither exit nor"),
        (f'method = "model"\n{_FEW}', {"engine": "openvino"}, "by ENGINE=torch alone, and this"),
        (f'method = "model"\n{_FEW}', {"engine": "vllm"}, "ENGINE=vllm has no part of a target"),
        (f"{_FOREST}{_FEW}", {}, "with few keys drafts no branches; use the recipe model"),
        (
            'method = "model"\nmodel = "@target"\nkv = {kind = "chunks", budget = 40}\n',
            {},
            "kv.chunks: budget = 40 holds no chunk of 8 beside 16 first and 30 latest keys",
        ),
        (
            'method = "model"\nmodel = "other"\nkv = {kind = "chunks"}\n',
            {},
            "chunks are of the model '@target', the target itself; others see a window",
        ),
    ],
)
def test_few_keys_that_cannot_be_seen_are_refused(
    deep_target: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recipe: str,
    settings: dict[str, Any],
    sentence: str,
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(deep_target[0]))
    (tmp_path / "recipe.toml").write_text(recipe)
    with pytest.raises(StartupError) as caught:
        loaded(deep_target, **({"drafts": str(tmp_path / "recipe.toml")} | settings))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_drafts_over_few_keys_by_torch(
    deep_target: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(deep_target[0]))
    (tmp_path / "recipe.toml").write_text(f'method = "model"\n{_FEW}')
    found = loaded(deep_target, drafts=str(tmp_path / "recipe.toml"))
    assert (found.drafts.info.pure, found.drafts.exit) == (False, 0)
    assert found.models[0].engine == "torch"
    assert not found.models[0].improving
    assert json.loads(found.drafts.info.recipe)["kv"]["budget"] == 48


def test_a_window_bounds_what_a_sequence_takes_and_not_the_texts(
    deep_target: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a small decoder inside of the target, whose own cache holds texts of 64 tokens."""
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(deep_target[0]))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('method = "model"\nkv = {kind = "window", budget = 200, sink = 4}\n')
    found = loaded(deep_target, drafts=str(recipe), max_sequences=3)
    (_, windowed) = found.models
    held = [windowed.reserve(64) for _ in range(3)]
    assert [cache.capacity for cache in held] == [456] * 3
    assert windowed.reserve(64) is None
    assert not found.drafts.info.pure
    assert found.drafts.info.held_length == 64


def test_a_drafter_service_has_no_target_to_take_a_part_of() -> None:
    recipe = ModelRecipe(model="@target", exit=2)
    settings = DrafterSettings(model="", max_length=64)
    with pytest.raises(StartupError, match=_NO_DRAFTER):
        load_models(recipe, settings, "", "", Truncation(0.999, 64))


def test_a_part_of_the_target_holds_nothing_of_its_own(
    deep_target: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither weights nor a KV cache; and what it says of itself."""
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", "@target")
    monkeypatch.setenv("TANDEM_DRAFTER_EXIT", "2")
    found = loaded(deep_target, drafts="model")
    whole, view = found.models
    assert view.pool is None
    assert view.pass_times
    assert json.loads(found.drafts.info.recipe)["model"] == "@target"
    assert found.drafts.exit == 2
    assert (found.drafts.info.pure, found.drafts.info.held_length) == (True, 64)
    assert view.about.fingerprint != whole.about.fingerprint
    (tmp_path / "skip.json").write_text('{"attention": [1], "mlp": []}')
    monkeypatch.setenv("TANDEM_DRAFTER_SKIP", str(tmp_path / "skip.json"))
    both = loaded(deep_target, drafts="model")
    assert (both.drafts.exit, both.drafts.info.pure) == (0, False)
    assert both.drafts.info.fingerprint != found.drafts.info.fingerprint


def test_another_vocabulary_is_refused(
    random_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_random_llama(tmp_path / "other", 3, vocab_size=7)
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(other))
    with pytest.raises(StartupError, match="target and other have 5 and 7 token ids"):
        loaded(random_pair, drafts="model")


@pytest.mark.parametrize(
    ("feedback", "own", "sentence"),
    [
        ("none", {}, "and target gives none: set the target's FEEDBACK to last"),
        ("0", {}, "and target gives 0: set the target's FEEDBACK to last"),
        ("last", {"made_for": "ab" * 32}, "made for a target with the weights abababababab, and"),
    ],
)
def test_a_head_of_another_target_is_refused(
    feedback: str,
    own: dict[str, str],
    sentence: str,
    random_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = save_random_head(tmp_path / "head", "medusa", random_pair[1])
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"tandem": own}))
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(head))
    with pytest.raises(StartupError, match="TANDEM_TARGET_DRAFTS: the head") as caught:
        loaded(random_pair, drafts="medusa", feedback=feedback)
    assert sentence in str(caught.value)


def test_a_head_of_the_target_drafts_in_it(
    random_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the head lacks is the target's own, without a word of it."""
    head = save_random_head(tmp_path / "head", "eagle", random_pair[1])
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(head))
    found = loaded(random_pair, drafts="eagle", feedback="0,last")
    told = found.drafts.feedback
    assert (told.columns, told.on_device) == ((1,), True)
    assert found.drafts.info.drafter == "eagle"
    assert found.info.cache_tokens > 0


def test_memory_that_does_not_hold_both_is_refused(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to lower."""
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(random_pair[0]))
    free = [1 << 30, 1 << 10, 1 << 10, 1 << 10]
    monkeypatch.setattr(size, "free_memory", lambda device: free.pop(0))
    with pytest.raises(StartupError, match=r"drafter: a KV cache of .* lower MAX_LENGTH"):
        loaded(random_pair, drafts="model", cache_tokens=0)


def test_one_sequence_may_be_as_long_as_the_model_however_few_there_are(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.settings.TOKENS_EACH", 100)
    found = loaded(random_pair, max_length=0, cache_tokens=0)
    assert found.info.max_length == found.info.cache_tokens == 512


@pytest.mark.parametrize(("cache_tokens", "length"), [(0, 512), (100, 100), (1000, 512)])
def test_a_sequence_may_be_as_long_as_the_model_and_the_cache(
    random_pair: tuple[Path, Path], cache_tokens: int, length: int
) -> None:
    found = loaded(random_pair, max_length=0, cache_tokens=cache_tokens)
    assert found.info.max_length == length
    assert found.info.cache_tokens == (cache_tokens or 2 * 4096)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"max_length": 0}, 2 * 4096),
        ({"max_length": 100}, 2 * 100),
        ({"max_length": 8192}, 2 * 4096),
        ({"max_length": 8192, "device": "cuda"}, ANY_LENGTH),
    ],
)
def test_a_cache_by_itself_is_bounded_on_a_cpu(settings: dict[str, Any], tokens: int) -> None:
    options = options_of(TargetSettings(model="m", max_sequences=2, memory_share=0.4, **settings))
    assert (options.at_most, options.share) == (tokens, 0.4)
    # A step of 512 and a prompt's largest chunk, and one round beyond.
    assert options.largest == (512 + 2048 + 17, 512 + 17, 0)


def test_a_cache_without_a_block_is_refused(random_pair: tuple[Path, Path]) -> None:
    sentence = "a KV cache of 15 tokens does not hold one block of 16; raise CACHE_TOKENS"
    with pytest.raises(StartupError, match=sentence):
        loaded(random_pair, max_length=0, cache_tokens=15, engine="torch")
    loaded(random_pair, max_length=0, cache_tokens=16, engine="torch")


def test_a_target_leaves_memory_to_what_drafts_in_it(
    deep_target: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(**settings: Any) -> float:
        own = TargetSettings(model=str(deep_target[0]), memory_share=0.5, **settings)
        return share_of_target(own_recipe(own), own)

    assert share() == share(drafts="lookup") == 0.5
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(deep_target[1]))
    assert share(drafts="model") == pytest.approx(0.25)
    monkeypatch.setattr("target_svc.loading.device_memory", lambda device: None)
    for device, drafts in (("cuda", "cuda"), ("cuda", "cuda:0"), ("cuda:0", "cuda")):
        found = share(drafts="model", device=device, draft_device=drafts)
        assert found == pytest.approx(0.25)
    assert share(drafts="model", device="cuda", draft_device="cuda:1") == 0.5
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", "@target")
    monkeypatch.setenv("TANDEM_DRAFTER_EXIT", "2")
    assert share(drafts="model") == 0.5
    sparse = tmp_path / "sparse.toml"
    sparse.write_text('method = "model"\nmodel = "@target"\nkv = {kind = "chunks", budget = 512}\n')
    assert share(drafts=str(sparse)) == 0.5
    own = TargetSettings(model=str(deep_target[0]), drafts=str(sparse), max_sequences=3)
    kept = kept_for_views(own_recipe(own), own)
    assert 3 * 512 < kept == 3 * positions_of(SparseKeys(budget=512), ANY_LENGTH)


def test_the_targets_own_part_is_what_its_decoder_has(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(random_pair[0]))
    rooms: list[float] = []
    making = size.cache_size

    def noted(device: Any, each: int, room: Room) -> int:
        rooms.append(room.share)
        return making(device, each, room)

    monkeypatch.setattr(decoders, "cache_size", noted)
    loaded(random_pair, drafts="model", memory_share=0.9)
    assert rooms == [pytest.approx(0.45, rel=0.01), 0.9]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.3), (0.8, 0.8)])
def test_prompts_have_a_share_of_passes(
    share: float, expected: float, random_pair: tuple[Path, Path]
) -> None:
    target = loaded(random_pair, prefill_share=share)
    assert target.engine._limits.prefill_share == expected
    # Of any device but a CPU.
    assert "cuda" not in PREFILL_SHARES
    assert BatchLimits().prefill_share == 0.5


def test_models_of_one_drafter_divide_its_part(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one holds counts for the second."""
    rooms: list[float] = []
    making = size.cache_size

    def noted(device: Any, each: int, room: Room) -> int:
        rooms.append(room.share)
        return making(device, each, room)

    monkeypatch.setattr(decoders, "cache_size", noted)
    settings = DrafterSettings(
        model=str(random_pair[0]),
        second_model=str(random_pair[1]),
        memory_share=0.6,
        method="forest",
    )
    recipe = built_in("forest", settings)
    for total, expected in ((None, [0.6, 0.6]), (80 << 30, [0.3, 0.6])):
        monkeypatch.setattr("tandem.serving.drafting.device_memory", lambda name, own=total: own)
        rooms.clear()
        load_models(recipe, settings, settings.model, "", settings.truncation)
        assert rooms == pytest.approx(expected, rel=0.01)


def test_a_sequence_of_one_token_is_no_length() -> None:
    with pytest.raises(ValueError, match="must be 0, or 2 at least"):
        TargetSettings(model="m", max_length=1)


def test_both_have_room_for_the_same_texts(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(random_pair[0]))
    found = loaded(random_pair, drafts="model")
    target, drafter = found.models
    assert target.positions == drafter.positions == found.info.cache_tokens == 128
    assert found.drafts.info.max_length == 64


@pytest.mark.parametrize(
    ("target", "drafter", "stay"),
    [("cpu", "cpu", False), ("cuda:0", "cuda:0", True), ("cuda:0", "cuda:1", False)],
)
def test_chains_stay_on_a_device_that_both_models_share(
    random_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    drafter: str,
    stay: bool,
) -> None:
    def placed(*args: Any, **kwargs: Any) -> Any:
        decoders = load_models(*args, **kwargs)
        kwargs["beside"].device = torch.device(target)
        for decoder in decoders:
            decoder.device = torch.device(drafter)
        return decoders

    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(random_pair[0]))
    monkeypatch.setattr("target_svc.loading.load_models", placed)
    assert loaded(random_pair, drafts="model").drafts.on_device == stay
