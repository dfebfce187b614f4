"""What a head's recipe asks of the target."""

from __future__ import annotations

import pytest

from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.engine.asks import Truncation
from tests.support.models.heads import MTP, family_of, random_head
from tests.support.models.tiny import random_llama


@pytest.mark.parametrize(("kind", "tokens"), [("medusa", 1), (MTP, 9), ("hydra", 9), ("eagle", 9)])
def test_of_a_prompt_only_a_head_that_remembers_wants_more_than_the_newest(
    kind: str, tokens: int
) -> None:
    recipe = built_in(family_of(kind), DrafterSettings(prompt_tokens=9))
    wants = recipe.make([random_head(kind, random_llama(1))], Truncation(1.0, 0)).traits.feedback
    assert wants.prompt_tokens == tokens
