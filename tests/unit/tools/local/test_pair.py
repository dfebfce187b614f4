"""What `tandem up` makes of its options: settings of services."""

from __future__ import annotations

import pytest

from tandem.failure import Misconfigured
from tandem.tools.local.pair import Pair, embedded


def test_drafts_inside_are_a_setting_of_the_target() -> None:
    services = Pair(inside=True).settings()
    assert services["target"]["DRAFTS"] == "model"
    assert services["drafter"]["MODEL"] == embedded("drafter")
    named = Pair(inside=True, recipe="tree", drafter_device="cuda:1").settings()
    assert (named["target"]["DRAFTS"], named["target"]["DRAFT_DEVICE"]) == ("tree", "cuda:1")


def test_otherwise_the_target_drafts_nothing() -> None:
    assert "DRAFTS" not in Pair(recipe="tree").settings()["target"]


@pytest.mark.parametrize(("recipe", "inside"), [("tree", False), (None, True), ("tree", True)])
def test_without_a_drafter_nothing_can_draft(recipe: str | None, inside: bool) -> None:
    with pytest.raises(Misconfigured, match="--drafter none that nothing does"):
        Pair(drafter="none", recipe=recipe, inside=inside).settings()
