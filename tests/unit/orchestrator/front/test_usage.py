"""What the texts of a call have cost, as its answer tells it."""

from __future__ import annotations

from orchestrator.front.http.replies import Usage
from tandem.peers.text.measures import TextCounts, TextTimes
from tandem.peers.text.values import FinishReason, Generation, Rule, Stopping, Summary
from tandem.speculation.request.sampling import Sampling


def summary(prompt: int, cached: dict[str, int], version: int = 0) -> Summary:
    generation = Generation(
        "id", (1,) * prompt, Sampling(), Stopping(4), "block", Rule("block"), 0, 0, ()
    )
    counts = TextCounts(cached_tokens=cached, weights_version=version)
    return Summary(generation, FinishReason.LENGTH, "", counts, TextTimes(), drafter_lost=False)


def test_a_prompts_tokens_are_counted_once_with_what_its_first_text_found() -> None:
    usage = Usage()
    usage.add(0, summary(40, {"target": 32, "drafter": 16}))
    usage.add(0, summary(40, {"target": 40}))  # what the first one has computed
    usage.add(1, summary(10, {"drafter": 8}))
    usage.add(2, summary(20, {"target": 16}))
    body = usage.body()
    assert body["prompt_tokens"] == 70
    assert body["prompt_tokens_details"] == {"cached_tokens": 48}


def test_the_version_of_weights_is_that_of_the_text_that_ended_last() -> None:
    usage = Usage()
    assert usage.body()["tandem"]["drafter_weights_version"] == 0
    for version in (5, 3):
        usage.add(0, summary(1, {}, version))
    assert usage.body()["tandem"]["drafter_weights_version"] == 3
