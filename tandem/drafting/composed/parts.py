"""Methods that draft chains after what another method drafted, and are told when that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.drafting.drafter import ANY_VOCABULARY, DraftedVocabulary, Drafter, DraftSequence
from tandem.drafting.part import PartDrafter
from tandem.engine.asks import Steps, ToHost, ToHostTogether
from tandem.errors import StartupError
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import Purpose, RandomNumbers, digits


def begin_part(
    drafter: Drafter, sequence: DraftSequence, caches: Sequence[object]
) -> Steps[DraftSequence]:
    """A part's own sequence, with the prompt taken in.

    Args:
        drafter: the part.
        sequence: of the whole.
        caches: the part's.
    """
    own = DraftSequence(
        list(sequence.token_ids), sequence.sampling, sequence.vocab_size, sequence.nodes
    )
    own.caches, own.shaped, own.within = list(caches), sequence.shaped, sequence
    own.salt = sequence.salt
    whole = sequence
    while whole.within is not None:
        whole = whole.within
    whole.parts += 1
    own.part = whole.parts
    own.numbers = RandomNumbers(sequence.sampling.seed, Purpose.DRAFT, digits, own.part)
    yield from drafter.open(own)
    return own


def data_of(parts: Sequence[Drafter]) -> str:
    """Fingerprint of what parts draft from, see `Traits`."""
    return " ".join(filter(None, (part.traits.data for part in parts)))


def vocabulary_of(parts: Sequence[Drafter]) -> DraftedVocabulary:
    """Whose ids parts draft, where they have a vocabulary of their own.

    Raises:
        StartupError: they have several.
    """
    own = ANY_VOCABULARY
    for part in parts:
        other = part.traits.vocabulary
        if other.tokenizer:
            if own.tokenizer not in ("", other.tokenizer):
                raise StartupError("the indexes of a recipe were built for different tokenizers")
            own = DraftedVocabulary(other.tokenizer, max(own.size, other.size))
    return own


def draft_chain(drafter: Drafter, own: DraftSequence, round_: int, gamma: int) -> Steps[Draft]:
    """A part's draft, as a chain.

    A method's last ask is to bring a chain to the host, and the target may take the chain from it;
    that of a part is not the last one of the whole, and is asked for in another way. Of a tree of
    certain tokens the path of first siblings is taken: they may be chosen in any way.
    """
    budget = max(gamma, drafter.traits.largest_tree)
    steps, answer = drafter.draft(own, round_, gamma, budget), None
    while True:
        try:
            ask = steps.send(answer)
        except StopIteration as ended:
            draft: Draft = ended.value
            break
        if isinstance(ask, ToHost) and ask.places is None:
            (answer,) = yield ToHostTogether([ask])
        else:
            answer = yield ask
    if draft.is_chain:
        return draft
    assert not any(draft.sizes)
    children, path = draft.tree.children, [0]
    while below := children[path[-1]]:
        path.append(below[0])
    return Draft.certain([draft.token_ids[place - 1] for place in path[1:]])


def assume(drafter: Drafter, own: DraftSequence, token_ids: Sequence[int], kept: int = 0) -> None:
    """Have a part go on after tokens that were drafted and are not emitted yet.

    Args:
        drafter: the part.
        own: its sequence.
        token_ids: at least one.
        kept: of the part's last draft, if it had one.
    """
    if own.threshold is not None:
        own.threshold.learn(kept)
    own.assumed += token_ids
    drafter.observe(own, token_ids)


def settle(drafter: PartDrafter, own: DraftSequence, emitted: Sequence[int]) -> None:
    """Tell a part what was emitted; of what it assumed, what came out stays. It observes the last
    token in any case."""
    agreed = 0
    for guess, token_id in zip(own.assumed, emitted[:-1], strict=False):
        if guess != token_id:
            break
        agreed += 1
    if agreed < len(own.assumed) and own.threshold is not None:
        own.threshold.drafted = 0  # what it drafted after them was not judged
    drafter.rewind(own, len(own.token_ids) - len(own.assumed) + agreed)
    own.assumed = []
    drafter.observe(own, emitted[agreed:])
