"""A walk over the states of both internal streams, through sockets, compared with a model of them.

Hypothesis chooses the steps, and shrinks a failure to the fewest steps.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.target.v1 import target_pb2
from tests.fuzz import seeds
from tests.fuzz.mutation import change
from tests.fuzz.services import HONEST_ROUNDS, PLACES, ROLES, Sequence, Services, Stream, honest
from tests.support.wire.talk import code_named

# What a sequence may hold in the end.
LONGEST = len(seeds.PROMPT) + seeds.MAX_NEW_TOKENS

# In one walk, for want of a place: each takes the second that a sequence waits for one.
_MOST_REFUSED = 3
# None comes after it: a mutant may have gone there at once.
_LAST_ROUND = 2**64 - 1


class StreamMachine(RuleBasedStateMachine):
    """Callers that do what they may and what they may not, beside an honest sequence of each."""

    services: ClassVar[Services]
    told: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.honest: dict[str, tuple[Stream, int]] = {}
        self.refused = 0

    @initialize()
    def begin(self) -> None:
        for role in ROLES:
            self.honest[role] = self.services.stream(role), 0
            self.go_on_honestly(role)
            self.streams.append(self.services.stream(role))
            self.open_sequence(len(self.streams) - 1, 1)

    @rule(role=st.sampled_from(ROLES))
    def go_on_honestly(self, role: str) -> None:
        """Its answers are what they are alone, whatever others do."""
        stream, round_ = self.honest[role]
        if round_ == HONEST_ROUNDS:
            return
        request = honest(role, round_)
        told = stream.ask(request)
        assert told == self.services.alone[role][round_], told
        self.told["OK"] += 1
        self.honest[role] = stream, round_ + 1

    @rule(role=st.sampled_from(ROLES))
    def open_stream(self, role: str) -> None:
        if len(self.streams) < 4:
            self.streams.append(self.services.stream(role))

    def _stream(self, pick: int) -> Stream:
        return self.streams[pick % len(self.streams)]

    def _busy(self, pick: int) -> Stream:
        """One with a sequence, of which there is one."""
        streams = [stream for stream in self.streams if stream.open]
        return streams[pick % len(streams)]

    def _taken(self, role: str) -> int:
        """Places, with the honest sequence's."""
        return 1 + sum(len(stream.open) for stream in self.streams if stream.role == role)

    def _expect(self, stream: Stream, told: Any, *codes: str) -> None:
        """An end with one of these; the sequence is over."""
        assert isinstance(told, common_pb2.SequenceEnd), told
        name = code_named(told.code)
        self.told[name] += 1
        assert name in codes, f"{name}: {told.sentence}"

    def _opening(self, stream: Stream, number: int) -> Any:
        make = seeds.open_draft if stream.role == "drafter" else seeds.open_verify
        request = make()
        request.sequence = number
        return request

    def _step(self, stream: Stream, number: int, round_: int, position: int, draft: Any) -> Any:
        request: Any
        if stream.role == "drafter":
            request = seeds.draft_step(round_, position)
        else:
            request = seeds.verify_step(draft, round_, position)
        request.sequence = number
        return request

    def _close(self, stream: Stream, number: int) -> Any:
        module = drafter_pb2 if stream.role == "drafter" else target_pb2
        return module.SequenceRequest(sequence=number, close=module.CloseSequence())

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 3), ahead=st.sampled_from((1, 1, 1, 2, 1000, 2**40)))
    def open_sequence(self, pick: int, ahead: int) -> None:
        stream = self._stream(pick)
        if (number := stream.last + ahead) >= 2**64:
            return
        full = self._taken(stream.role) == PLACES
        self.refused += full
        if full and self.refused > _MOST_REFUSED:
            return
        told = stream.ask(self._opening(stream, number))
        stream.last = number
        if full:
            self._expect(stream, told, "RESOURCE_EXHAUSTED")
            return
        assert not isinstance(told, common_pb2.SequenceEnd), told
        self.told["OK"] += 1
        prompt = len(seeds.PROMPT)
        stream.open[number] = Sequence(prompt + (stream.role == "target"), 0)

    def _pick(self, stream: Stream, pick: int) -> tuple[int, Sequence] | None:
        numbers = [n for n, sequence in stream.open.items() if sequence.round < _LAST_ROUND]
        if not numbers:
            return None
        number = numbers[pick % len(numbers)]
        return number, stream.open[number]

    @precondition(lambda self: any(stream.open for stream in self.streams))
    @rule(
        pick=st.integers(0, 3),
        which=st.integers(0, 5),
        later=st.sampled_from((1, 1, 2, 99, 2**32, 2**62)),
        draft=st.sampled_from(seeds.DRAFTS),
    )
    def step(self, pick: int, which: int, later: int, draft: Any) -> None:
        stream = self._busy(pick)
        if (found := self._pick(stream, which)) is None:
            return
        number, sequence = found
        round_ = sequence.round + later
        if round_ >= 2**64 or sequence.length + seeds.MAX_GAMMA >= LONGEST:
            return
        told = stream.ask(self._step(stream, number, round_, sequence.length, draft))
        assert not isinstance(told, common_pb2.SequenceEnd), told
        self.told["OK"] += 1
        assert told.round == round_
        sequence.round, sequence.length = round_, told.position

    @precondition(lambda self: any(stream.open for stream in self.streams))
    @rule(
        pick=st.integers(0, 3),
        which=st.integers(0, 5),
        grants=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        fault=st.sampled_from((None, None, "nothing", "too many", "another", "a step")),
    )
    def run(self, pick: int, which: int, grants: list[int], fault: str | None) -> None:
        """Rounds of a target, granted at once or amid others; or what may not come amid them."""
        stream = self._busy(pick)
        if stream.role == "drafter" or (found := self._pick(stream, which)) is None:
            return
        number, sequence = found
        first, length = sequence.round + 1, sequence.length
        if first + sum(grants) > _LAST_ROUND or length + sum(grants) >= LONGEST:
            return
        begun, *later = grants
        requests = [seeds.run_step(first, length, begun)]
        requests += [seeds.run_step(0, 0, count) for count in later]
        if fault is not None:
            requests.append(
                {
                    "nothing": seeds.run_step(0, 0, 0),
                    "too many": seeds.run_step(0, 0, seeds.MAX_ROUNDS + 1),
                    "another": seeds.run_step(first, length, 1),
                    "a step": seeds.verify_step(common_pb2.Draft(), first, length),
                }[fault]
            )
        for request in requests:
            request.sequence = number
        told = stream.ask_all(requests, sum(grants))
        if fault is not None:
            malformed = fault in ("nothing", "too many")
            code = "INVALID_ARGUMENT" if malformed else "FAILED_PRECONDITION"
            self._expect(stream, told[-1], code)
            del stream.open[number]
            return
        for place, verdict in enumerate(told):
            assert (verdict.round, verdict.position) == (first + place, length + place + 1)
        assert verdict.last
        self.told["OK"] += 1
        sequence.round, sequence.length = verdict.round, verdict.position

    @precondition(lambda self: any(stream.open for stream in self.streams))
    @rule(
        pick=st.integers(0, 3),
        which=st.integers(0, 5),
        fault=st.sampled_from(("round", "ahead", "behind", "open", "twice", "nothing")),
    )
    def break_order(self, pick: int, which: int, fault: str) -> None:
        stream = self._busy(pick)
        if (found := self._pick(stream, which)) is None:
            return
        number, sequence = found
        round_, length = sequence.round + 1, sequence.length
        sound = self._step(stream, number, round_, length, common_pb2.Draft())
        requests = {
            "round": [self._step(stream, number, sequence.round, length, common_pb2.Draft())],
            "ahead": [self._step(stream, number, round_, length + 1, common_pb2.Draft())],
            "behind": [self._step(stream, number, round_, length - 1, common_pb2.Draft())],
            "open": [self._opening(stream, number)],
            "twice": [sound, sound],
            "nothing": [type(sound)(sequence=number)],
        }[fault]
        told = stream.ask(*requests)
        code = "INVALID_ARGUMENT" if fault == "nothing" else "FAILED_PRECONDITION"
        self._expect(stream, told, code)
        del stream.open[number]

    @precondition(lambda self: any(stream.open for stream in self.streams))
    @rule(pick=st.integers(0, 3), which=st.integers(0, 5), source=st.integers(0, 2**32))
    def send_mutant(self, pick: int, which: int, source: int) -> None:
        """A changed step: refused, or answered."""
        stream = self._busy(pick)
        if (found := self._pick(stream, which)) is None:
            return
        number, sequence = found
        numbers = random.Random(source)
        draft = numbers.choice(seeds.DRAFTS)
        request = self._step(stream, number, sequence.round + 1, sequence.length, draft)
        change(numbers, request.draft if stream.role == "drafter" else request.verify)
        told = stream.ask(request)
        if isinstance(told, common_pb2.SequenceEnd):
            self._expect(stream, told, "INVALID_ARGUMENT", "FAILED_PRECONDITION")
            del stream.open[number]
            return
        self.told["OK"] += 1
        sequence.round, sequence.length = told.round, told.position

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 3), number=st.sampled_from((0, 1, 2)), closing=st.booleans())
    def speak_of_what_is_over(self, pick: int, number: int, closing: bool) -> None:
        stream = self._stream(pick)
        if number in stream.open or number > stream.last:
            return
        step = self._step(stream, number, 1, 3, common_pb2.Draft())
        told = stream.ask(self._close(stream, number) if closing else step)
        self._expect(stream, told, "OK" if closing else "FAILED_PRECONDITION")

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 3), kind=st.sampled_from(("step", "close", "nothing")))
    def begin_wrongly(self, pick: int, kind: str) -> None:
        stream = self._stream(pick)
        stream.last += 1
        step = self._step(stream, stream.last, 1, 3, common_pb2.Draft())
        request, code = {
            "step": (step, "FAILED_PRECONDITION"),
            "close": (self._close(stream, stream.last), "OK"),
            "nothing": (type(step)(sequence=stream.last), "INVALID_ARGUMENT"),
        }[kind]
        self._expect(stream, stream.ask(request), code)

    @precondition(lambda self: any(stream.open for stream in self.streams))
    @rule(pick=st.integers(0, 3), which=st.integers(0, 5), busy=st.booleans())
    def close_sequence(self, pick: int, which: int, busy: bool) -> None:
        """In order, or before the answer to a step."""
        stream = self._busy(pick)
        if (found := self._pick(stream, which)) is None:
            return
        number, sequence = found
        requests = [self._close(stream, number)]
        if busy:
            step = self._step(
                stream, number, sequence.round + 1, sequence.length, common_pb2.Draft()
            )
            requests.insert(0, step)
        self._expect(stream, stream.ask(*requests), "OK")
        del stream.open[number]

    @precondition(lambda self: self.streams)
    @rule(pick=st.integers(0, 3))
    def cancel_stream(self, pick: int) -> None:
        stream = self._stream(pick)
        self.streams.remove(stream)
        stream.cancel()
        left = self._taken(stream.role)
        self.services.until(lambda: self.services.open_sequences(stream.role) == left)

    def teardown(self) -> None:
        """Nothing is left when everybody has gone."""
        for stream in [*self.streams, *(stream for stream, _ in self.honest.values())]:
            stream.cancel()
        for role in ROLES:
            self.services.until(partial(self.services.is_empty, role))


def walk(number: int, walks: int, steps: int = 30, *, shrink: bool = True) -> Counter[str]:
    """Walk so many times, by a seed; how requests were answered.

    Args:
        number: the seed.
        walks: as many.
        steps: of each.
        shrink: whether the fewest steps to a failure are looked for, which may take minutes.

    Raises:
        AssertionError: the model was wrong, or the services were; the steps are printed.
    """
    StreamMachine.services, StreamMachine.told = Services(), Counter()
    chosen = settings(
        max_examples=walks,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(StreamMachine), settings=chosen)
    finally:
        StreamMachine.services.stop()
    return StreamMachine.told
