"""What a service with an engine is, once it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tandem.common.v1 import common_pb2
from tandem.engine.engine import Engine
from tandem.inference.model import Model
from tandem.profile import Profile
from tandem.rpc.log_probs import write_given
from tandem.shaping.grammar import Grammars

if TYPE_CHECKING:
    from tandem.telemetry.metrics.instruments import Instruments


def passes_of(model: Model) -> list[common_pb2.PassTime]:
    """What passes of a model's new sequences take, as a message says it."""
    return [
        common_pb2.PassTime(sequences=sequences, rows=rows, nanoseconds=round(nanoseconds))
        for sequences, rows, nanoseconds in model.pass_times
    ]


@dataclass(frozen=True)
class LoadedService:
    """What a service is, once it is ready.

    Attributes:
        engine: runs the sequences.
        info: the handshake's message, but for what changes.
        models: that score, if any do; of several the first one is described.
    """

    engine: Engine
    info: common_pb2.ModelInfo
    models: Sequence[Model]

    @property
    def drafts_inside(self) -> bool:
        """Whether a target also drafts."""
        return False

    @cached_property
    def grammars(self) -> Grammars:
        """For texts that keep to one."""

        def tokenizer() -> bytes:
            return self.models[0].about.tokenizer_json() if self.models else b""

        return Grammars(tokenizer, self.info.vocab_size, self.info.eos_token_ids)

    def described(self) -> common_pb2.ModelInfo:
        """The handshake's message, now."""
        info = common_pb2.ModelInfo()
        info.CopyFrom(self.info)
        info.shapes_logits = True
        info.overcommit = self.engine.admission.limits.overcommit
        write_given(info)
        if self.models:
            info.dtype, info.engine = self.models[0].dtype, self.models[0].engine
            info.weights_version = self.models[0].about.weights_version
            info.improving = any(model.improving for model in self.models)
            del info.pass_times[:]
            info.pass_times.extend(passes_of(self.models[0]))
        return info

    def stats(self) -> common_pb2.EngineStats:
        """The work done since the start."""
        return common_pb2.EngineStats(
            open_sequences=self.engine.admission.open_sequences,
            forward_passes=sum(model.forward_passes for model in self.models),
            fed_tokens=sum(model.fed_tokens for model in self.models),
            opened_sequences=self.engine.admission.opened,
            promised_tokens=self.engine.admission.promised,
            held_tokens=max((m.positions - m.free_positions for m in self.models), default=0),
            longest_tokens=self.engine.admission.longest,
        )

    def forget_prefixes(self) -> int:
        """Empty the caches of prefixes; see `Model`."""
        return sum(model.forget_prefixes() for model in self.models)

    def meter(self, instruments: Instruments) -> None:
        """Have metrics read what only some services have."""

    def close(self) -> None:
        """End what works beside the engine, which has stopped. Waits."""
        for model in self.models:
            model.close()

    def improve(self) -> None:
        """Look for faster passes, model by model, and read the tokenizer for grammars, so that the
        first grammar does not wait for it. Slow; from any thread."""
        try:
            self.grammars.prepare()
        finally:
            for model in self.models:
                model.improve()
        if self.models:
            self.engine.expect(Profile(self.models[0].pass_times))
