"""Prompts are encoded without blocking other work, a bounded number at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.front.encoder import PromptEncoder
from orchestrator.front.queue import QueueLimits
from orchestrator.text.codec import TextCodec
from tandem.errors import DeadlineExceeded, Exhausted, Unavailable
from tests.support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.real_time  # prompts are encoded in threads


def encoder_of(codec: Any, *, at_once: int, waiting: int) -> PromptEncoder:
    return PromptEncoder(codec, at_once, QueueLimits(waiting, seconds=60.0))


class SlowCodec:
    """Encodes when it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.running = self.most = 0
        self.begun: list[str] = []
        self._lock = threading.Lock()

    def encode(self, text: str, special: bool) -> list[int]:
        with self._lock:
            self.begun.append(text)
            self.running += 1
            self.most = max(self.most, self.running)
        self.go_on.wait(10)
        with self._lock:
            self.running -= 1
        return [len(text)]


async def test_some_are_encoded_some_wait_and_one_more_is_refused() -> None:
    codec: Any = SlowCodec()
    encoder = encoder_of(codec, at_once=2, waiting=3)
    texts = [asyncio.create_task(encoder.encode("x" * length)) for length in range(5)]
    await asyncio.sleep(0.05)
    with pytest.raises(Exhausted, match="every place is taken, and 3 others wait"):
        await encoder.encode("one more")
    codec.go_on.set()
    assert await asyncio.gather(*texts) == [[length] for length in range(5)]
    assert codec.most == 2
    assert await encoder.encode("later") == [5], "and room again"
    encoder.close()


async def test_a_client_with_many_prompts_holds_no_other_up() -> None:
    codec: Any = SlowCodec()
    encoder = encoder_of(codec, at_once=2, waiting=2)
    greedy = [asyncio.create_task(encoder.encode("x" * 7, "greedy")) for _ in range(4)]
    await until(lambda: codec.running == 2)
    modest = asyncio.create_task(encoder.encode("y", "modest"))
    with pytest.raises(Exhausted, match="clients with fewer texts came"):
        await greedy[3]
    codec.go_on.set()
    assert await asyncio.gather(*greedy[:3], modest) == [[7], [7], [7], [1]]
    assert [len(text) for text in codec.begun] == [7, 7, 1, 7]
    encoder.close()


async def test_a_deadline_may_pass_before_a_prompts_turn() -> None:
    codec: Any = SlowCodec()
    encoder = encoder_of(codec, at_once=1, waiting=2)
    first = asyncio.create_task(encoder.encode("x"))
    await until(lambda: bool(codec.running))
    with pytest.raises(DeadlineExceeded):
        await encoder.encode("y", remaining=0.02)
    codec.go_on.set()
    assert await first == [1]
    encoder.close()


async def test_who_gives_up_leaves_nothing_behind() -> None:
    codec: Any = SlowCodec()
    encoder = encoder_of(codec, at_once=1, waiting=1)
    working = asyncio.create_task(encoder.encode("long"))
    await until(lambda: bool(codec.running))
    for _ in range(50):
        waiting = asyncio.create_task(encoder.encode("x"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert encoder._threads._work_queue.qsize() == 0
    working.cancel()
    await asyncio.wait([working])
    waiting = asyncio.create_task(encoder.encode("y"))
    await asyncio.sleep(0.05)
    assert codec.most == 1, "its thread still works"
    assert encoder.waiting == 1, "and its place is not free before it has ended"
    codec.go_on.set()
    assert await waiting == [1]
    encoder.close()


async def test_all_who_wait_hear_that_it_was_closed() -> None:
    """As where the targets have another model now."""
    codec: Any = SlowCodec()
    encoder = encoder_of(codec, at_once=1, waiting=3)
    texts = [asyncio.create_task(encoder.encode("x")) for _ in range(4)]
    await until(lambda: bool(codec.running))
    encoder.close()
    codec.go_on.set()
    done = await asyncio.wait_for(asyncio.gather(*texts, return_exceptions=True), HANG_SECONDS)
    assert done[0] == [1]
    assert [type(error) for error in done[1:]] == [Unavailable] * 3
    assert encoder.waiting == 0


def byte_level() -> bytes:
    """A tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(dict(zip(alphabet, range(256), strict=True)), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


async def test_a_long_prompt_holds_no_other_text_up() -> None:
    """The library's `encode` holds the interpreter's lock: then the loop would not turn at all."""
    codec = TextCodec(byte_level())
    encoder = encoder_of(codec, at_once=1, waiting=0)
    encoding = asyncio.create_task(encoder.encode("\N{GRINNING FACE}" * 100_000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) == 400_000
    assert turns > 5
    encoder.close()


def test_a_token_stands_for_as_many_characters_as_it_has() -> None:
    assert TextCodec(byte_level()).longest_token == 1
    words = Tokenizer(models.WordLevel({"a": 0, "b" * 40: 1}, unk_token="a"))
    assert TextCodec(words.to_str().encode()).longest_token == 1000, "or what is unknown to it"
    assert TextCodec(b"").longest_token == 0
