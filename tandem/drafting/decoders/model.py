"""Drafts by a small decoder of the target's family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from tandem.drafting.drafter import Checkpoint, DraftSequence, Recipe, Setting, Traits
from tandem.drafting.part import PartDrafter
from tandem.drafting.stop import FIXED, THRESHOLD, Stop, StopRule
from tandem.engine.asks import Draw, ReadTokens, Steps, Take, ToHost, Truncation
from tandem.engine.scorer import Scorer
from tandem.inference.feed import DrawnToken, Feed
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.speculation.draft import Draft

if TYPE_CHECKING:  # the table of methods is read where torch is not installed
    from tandem.inference.kv.pool import SequenceCache


class ModelDrafter(PartDrafter):
    """Samples from a model's own processed, truncated distribution.

    A sequence's state is the tokens that its cache holds: emitted ones, then drafted ones.

    Attributes:
        scorer: the small model.
        truncation: of its distributions.

    Args:
        scorer: the small model.
        truncation: of its distributions.
        stop: when a draft ends early; the method is not pure then.
    """

    traits = Traits(pure=True, prepares=True)

    def __init__(self, scorer: Scorer, truncation: Truncation, stop: Stop = FIXED) -> None:
        self.scorer, self.truncation, self._stop = scorer, truncation, stop
        pure = self.traits.pure and not stop.early
        self.traits = replace(self.traits, pure=pure, looks=scorer)

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in."""
        prompt, cache = list(sequence.token_ids), cache_of(sequence)
        found = cache.adopt(prompt, sequence.salt)
        if rest := prompt[found:]:  # a view finds all of it
            yield Take(self.scorer, Feed(cache, self.known(rest), 0))
        sequence.state = prompt
        publish(sequence)
        if self._stop.early:
            sequence.threshold = self._stop.begin()

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """One pass and one draw a token; the drafted tokens stay on the device until the end. Where
        nothing is decided between them, the engine may draw several for one ask."""
        held: list[int] = sequence.state
        news = sequence.token_ids[len(held) :]
        held += news
        chain: list[DrawnToken] = []
        path: list[int] = []  # known only where it shapes the next row
        gamma = min(gamma, budget)
        while len(chain) < gamma:
            shaped = sequence.shaped_rows([path])
            node, decides = len(chain), shaped is not None or self._stop.early
            drawn: list[DrawnToken] = yield Draw(
                scorer=self.scorer,
                feed=Feed(cache_of(sequence), chain[-1] if chain else self.known(news), 1),
                sampling=sequence.sampling,
                truncation=self.truncation,
                vocab_size=sequence.vocab_size,
                numbers=sequence.numbers,
                round=round_,
                node=node,
                nodes=gamma,
                shaped=shaped,
                confident=self._stop.early,
                follow=0 if decides else gamma - node - 1,
            )
            chain += drawn
            if len(chain) == gamma:
                break
            if sequence.threshold and not (yield from self._go_on_behind(sequence, drawn))[0]:
                break
            if shaped is not None:
                path = [*path, *(yield ReadTokens(drawn))]
        if sequence.threshold is not None:
            sequence.threshold.drafted, sequence.threshold.asked = len(chain), gamma
        draft: Draft = yield ToHost(chain)
        # All but the last were fed; a rollback has to know them.
        held += draft.token_ids[:-1]
        return draft

    def _go_on_behind(
        self, sequence: DraftSequence, drawn: Sequence[DrawnToken]
    ) -> Steps[Sequence[bool]]:
        """After which of these tokens more may be drawn."""
        if sequence.threshold is None:
            return [True] * len(drawn)
        shares: Sequence[float] = yield ReadTokens(drawn, shares=True)
        return [share >= sequence.threshold.value for share in shares]

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Keep what was drafted as it came out, roll the rest back. Computes nothing."""
        if sequence.threshold is not None:
            sequence.threshold.learn(len(emitted) - 1)
        held: list[int] = sequence.state
        agreed = min(len(held), len(sequence.token_ids))
        for token_id, guess in zip(emitted, held[agreed:], strict=False):
            if token_id != guess:
                break
            agreed += 1
        sequence.token_ids.extend(emitted)
        held[agreed:] = sequence.token_ids[agreed:]
        del held[cache_of(sequence).keep_text(agreed, len(sequence.token_ids)) :]
        publish(sequence)

    def rewind(self, sequence: DraftSequence, length: int) -> None:
        """See `PartDrafter`; what the cache holds of the tokens that stay, stays."""
        if length < len(sequence.token_ids):
            held: list[int] = sequence.state
            kept = min(len(held), length - 1)
            cache_of(sequence).rollback(kept)
            del held[kept:]
        super().rewind(sequence, length)

    def known(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Ids that the model has: a target may pad its vocabulary further.

        Any token in such a one's place keeps the text exact: a draft only has to come from
        the rows that it says.
        """
        last = self.scorer.vocab_size - 1
        if max(token_ids) <= last:
            return token_ids
        return [min(token_id, last) for token_id in token_ids]


def cache_of(sequence: DraftSequence) -> SequenceCache:
    """Its extent of the only scorer's pool."""
    cache: SequenceCache = sequence.caches[0]
    return cache


def publish(sequence: DraftSequence) -> None:
    """Let others find what is computed of a text; but for its last token, which is computed again
    where drafts are made ahead, and for tokens that are not emitted yet."""
    settled = len(sequence.token_ids) - len(sequence.all_assumed())
    cache_of(sequence).publish(sequence.token_ids, settled - 1)


StopKey = Annotated[
    StopRule,
    Setting(
        "stop",
        "where a draft ends: fixed (at its full depth), confidence (after a token whose probability"
        " is below THRESHOLD), adaptive (likewise; each text learns its threshold)",
    ),
]
ThresholdKey = Annotated[
    float,
    Field(ge=0, le=1),
    Setting("threshold", "probability below which a drafted token ends a draft"),
]


class _Kv(BaseModel):
    """Which keys of the text a model sees; of `SparseKeys`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int = SparseKeys.budget
    sink: int = SparseKeys.sink

    @property
    def keys(self) -> SparseKeys:
        """As the model takes them."""
        return SparseKeys(**self.model_dump())

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if fault := self.keys.fault:
            raise ValueError(fault)
        return self


class ChunksKv(_Kv):
    """Chunks that a query points at, beside the first and the latest keys."""

    kind: Literal["chunks"] = "chunks"
    recent: int = SparseKeys.recent
    chunk: int = SparseKeys.chunk


class WindowKv(_Kv):
    """The first and the latest keys."""

    kind: Literal["window"] = "window"


class OfModel(Recipe):
    """A recipe with one model."""

    model: str = ""
    adapter: Annotated[
        str,
        Setting("adapter", "folder of a low-rank adapter (peft's files) of MODEL; empty for none"),
    ] = ""
    exit: Annotated[
        int,
        Field(ge=0),
        Setting("exit", "number of MODEL's first layers that are computed; 0 computes all"),
    ] = 0
    skip: Annotated[
        str,
        Setting("skip", "file with the sublayers of MODEL that are left out; empty for none"),
    ] = ""

    stop: StopKey = "fixed"
    threshold: ThresholdKey = THRESHOLD

    @field_serializer("model", "adapter", "skip")
    def _name(self, path: str) -> str:
        """Without its place on this machine: what is told to callers."""
        return Path(path).name

    @property
    def stops(self) -> Stop:
        """When a draft ends early."""
        return Stop(self.stop, self.threshold)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """One."""
        return (Checkpoint(self.model, adapter=self.adapter, exit=self.exit, skip=self.skip),)


class ModelRecipe(OfModel):
    """The recipe of `model`.

    Attributes:
        kv: keys of its text that the model sees; None for all. Chunks are of the target itself.
    """

    drafts: ClassVar = "a chain by a small decoder (the default)"
    drafter: ClassVar = ModelDrafter

    method: Literal["model"] = "model"
    kv: Annotated[ChunksKv | WindowKv, Field(discriminator="kind")] | None = None

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """One."""
        (own,) = super().checkpoints
        return (own._replace(keys=None if self.kv is None else self.kv.keys),)

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> ModelDrafter:
        """See `Recipe`. Which keys are seen hangs on where rounds began: then it is not pure."""
        drafter = ModelDrafter(scorers[0], truncation, self.stops)
        if self.kv is not None:
            drafter.traits = replace(drafter.traits, pure=False)
        return drafter
