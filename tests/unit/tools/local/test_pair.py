"""What `tandem up` makes of its options: settings of services."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.failure import Misconfigured
from tandem.tools.local.pair import Pair, _bytes_of, embedded
from tandem.tools.local.process import ROOT
from tests.support.models.heads import save_random_head
from tests.support.models.tiny import save_random_llama


def test_drafts_inside_are_a_setting_of_the_target() -> None:
    services = Pair(inside=True).settings()
    assert services["target"]["DRAFTS"] == "model"
    assert services["drafter"]["MODEL"] == embedded("drafter")
    named = Pair(inside=True, recipe="tree", drafter_device="cuda:1").settings()
    assert (named["target"]["DRAFTS"], named["target"]["DRAFT_DEVICE"]) == ("tree", "cuda:1")


@pytest.mark.parametrize(
    ("target", "drafter", "shares"),
    [
        ("cuda", "cuda", True),
        ("cuda", "cuda:0", True),
        ("cuda:1", "cuda:1", True),
        ("cuda", "cuda:1", False),
        ("cuda", None, False),
        ("cpu", "cpu", False),
        (None, None, False),
    ],
)
def test_a_pair_knows_whether_it_shares_a_gpu(
    target: str | None, drafter: str | None, shares: bool
) -> None:
    pair = Pair(target_device=target, drafter_device=drafter)
    assert pair.shares_a_gpu == shares
    assert not replace(pair, drafter="none").shares_a_gpu


def test_a_gpus_memory_is_read_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor last; do :; done\ntest "$last" = GPU-7 && echo 24576\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    assert [_bytes_of(name) for name in ("cuda:1", "cuda", "cuda:2", "cpu")] == [
        24 << 30,
        None,
        None,
        None,
    ]
    monkeypatch.setenv("PATH", "")
    assert _bytes_of("cuda:1") is None


def test_services_of_one_device_have_parts_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(pair: Pair) -> list[str | None]:
        services = pair.settings()
        return [services[name].get("MEMORY_SHARE") for name in ("target", "drafter")]

    for device in ("cuda", None):
        target, drafter = map(float, parts(Pair(target_device=device, drafter_device=device)))  # type: ignore[arg-type]
        assert target > drafter > 0.2
        assert target + drafter == pytest.approx(1)
    assert parts(Pair(target_device="cuda", drafter_device="cuda:1")) == [None, None]
    # The file may name a model, which is not looked for.
    recipe = tmp_path / "own.toml"
    recipe.write_text('method = "model"\nmodel = "/elsewhere"\n')
    own = Pair(str(ROOT / "models" / "target"), recipe=str(recipe))
    on_one = replace(own, target_device="cuda", drafter_device="cuda")
    assert parts(on_one) == ["0.800", "0.200"]
    assert not on_one.shares_a_gpu
    assert parts(replace(on_one, recipe="lookup")) == [None, None]
    # One process divides its own; what the user says stays.
    assert parts(Pair(target_device="cuda", drafter_device="cuda", inside=True)) == [None, None]
    monkeypatch.setenv("TANDEM_DRAFTER_MEMORY_SHARE", "0.1")
    assert parts(Pair(target_device="cuda", drafter_device="cuda")) == [None, None]
    monkeypatch.delenv("TANDEM_DRAFTER_MEMORY_SHARE")
    monkeypatch.setenv("TANDEM_TARGET_DEVICE", "cuda")
    assert parts(Pair()) == [None, None]
    monkeypatch.setenv("TANDEM_DRAFTER_DEVICE", "cuda:0")
    assert None not in parts(Pair())


def test_otherwise_the_target_drafts_nothing() -> None:
    assert "DRAFTS" not in Pair(recipe="tree").settings()["target"]


@pytest.mark.parametrize(("recipe", "inside"), [("tree", False), (None, True), ("tree", True)])
def test_without_a_drafter_nothing_can_draft(recipe: str | None, inside: bool) -> None:
    with pytest.raises(Misconfigured, match="--drafter none that nothing does"):
        Pair(drafter="none", recipe=recipe, inside=inside).settings()


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_head_is_known_by_its_files(method: str, inside: bool, tmp_path: Path) -> None:
    """And sets what drafts, and what the target gives it."""
    target = save_random_llama(tmp_path / "target", 1)
    head = save_random_head(tmp_path / "head", method, target)
    services = Pair(str(target), str(head), inside=inside).settings()
    drafter, own = services["drafter"], services["target"]
    assert (drafter["METHOD"], drafter["MODEL"], drafter["TARGET"]) == (
        method,
        str(head),
        str(target),
    )
    assert own["FEEDBACK"] == "last"
    assert own.get("DRAFTS") == (method if inside else None)


def test_a_broken_head_is_named(tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "target", 1)
    head = save_random_head(tmp_path / "head", "eagle", target)
    (head / "model.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(Misconfigured, match="drafter: cannot read the weights"):
        Pair(str(target), str(head)).settings()


def test_the_embedded_target_has_rows_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user names others, or another target."""
    own = Pair(recipe="masks").settings()["target"]
    assert (Path(own["EXTRA_EMBEDDINGS"]) / "extra_embeddings.safetensors").is_file()
    assert "EXTRA_EMBEDDINGS" not in Pair(recipe="lookahead").settings()["target"]
    for name in ("ADAPTER", "EXTRA_EMBEDDINGS"):
        with monkeypatch.context() as patch:
            patch.setenv(f"TANDEM_TARGET_{name}", "somewhere")
            assert "EXTRA_EMBEDDINGS" not in Pair(recipe="masks").settings()["target"]
