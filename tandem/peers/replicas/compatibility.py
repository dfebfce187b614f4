"""Whether the services of a deployment fit together, and what they offer as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import Unavailable
from tandem.peers.text.values import Rule
from tandem.profile import PassTime
from tandem.rpc import log_probs
from tandem.rpc.feedback import given_from, spec_from
from tandem.rpc.messages import AROUND_BYTES, PROTOCOL_VERSION
from tandem.speculation.feedback import NO_FEEDBACK, FeedbackGiven, FeedbackWanted, misfit, united
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2


def require_protocol(info: common_pb2.ModelInfo, who: str) -> None:
    """Refuse a peer of another contract.

    Raises:
        Unavailable: which version it speaks.
    """
    if info.protocol_version != PROTOCOL_VERSION:
        raise Unavailable(
            f"{who} speaks protocol version {info.protocol_version}, we speak"
            f" {PROTOCOL_VERSION}: deploy the same release of all services"
        )


def require_fit(target: common_pb2.ModelInfo, other: common_pb2.ModelInfo, who: str) -> None:
    """Refuse a peer whose tokens or protocol are not the target's.

    Raises:
        Unavailable: what differs.
    """
    require_protocol(other, who)
    if not other.vocab_size:  # a drafter without a model takes any id
        return
    if other.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise Unavailable(
            f"{who} ({other.model}) has another tokenizer than the target ({target.model}):"
            f" fingerprints {_short(other)} and {_short(target)}; a pair must share its tokenizer:"
            " take two models with one, or compare their tokenizer.json token by token"
        )
    if not target.tokenizer_fingerprint and other.vocab_size != target.vocab_size:
        raise Unavailable(
            f"{who} has {other.vocab_size} token ids, the target {target.vocab_size},"
            " and neither has a tokenizer that would say which agree"
        )


_TREES = (common_pb2.DRAFT_SHAPE_TREE, common_pb2.DRAFT_SHAPE_IID_CHAINS)


def require_trees(target: common_pb2.ModelInfo, reply: drafter_pb2.GetModelInfoResponse) -> None:
    """Refuse a drafter of trees where the target takes chains alone.

    Raises:
        Unavailable: who they are.
    """
    if reply.shape in _TREES and not target.max_nodes:
        raise Unavailable(
            f"a drafter ({reply.info.model}, {reply.drafter}) drafts trees, and the target"
            f" ({target.model}) takes chains alone: raise its MAX_NODES, or draft by METHOD=model"
        )


def require_feedback(
    target: target_pb2.GetModelInfoResponse, reply: drafter_pb2.GetModelInfoResponse
) -> None:
    """Refuse a drafter that was made for another target, or wants to know or see computed what
    the target does not give.

    Raises:
        Unavailable: what differs.
    """
    who, own = f"a drafter ({reply.info.model})", target.info
    wanted = wish_from(reply)
    if wanted is None:
        dtype = reply.feedback.hidden_dtype
        raise Unavailable(f"{who} reads hidden states of an unknown dtype, {dtype}")
    most = min(own.max_message_bytes, reply.info.max_message_bytes) - AROUND_BYTES
    if fault := misfit(wanted, _given_by(target, most)):
        raise Unavailable(f"{who} {fault}")


def _given_by(
    reply: target_pb2.GetModelInfoResponse, message_bytes: int | None = None
) -> FeedbackGiven:
    """What a target can tell, and compute beside a draft."""
    return given_from(
        reply.info,
        layers=reply.feedback_layers,
        probe_tokens=reply.probe_tokens,
        message_bytes=message_bytes,
    )


def _short(info: common_pb2.ModelInfo) -> str:
    return info.tokenizer_fingerprint[:12] or "(none)"


# What two targets have to have in common to be replicas, by the names of fields.
Law = Mapping[str, object]


def law_of(reply: target_pb2.GetModelInfoResponse) -> Law:
    """What a target's texts hang on."""
    info = reply.info
    return {
        "fingerprint": info.fingerprint,
        "dtype": info.dtype,
        "vocab_size": info.vocab_size,
        "tokenizer_fingerprint": info.tokenizer_fingerprint,
        "eos_token_ids": sorted(info.eos_token_ids),
        "shapes_logits": info.shapes_logits,
        **log_probs.given_from(info)._asdict(),
        "verifiers": sorted(rule.name for rule in reply.verifiers),
    }


def require_law(law: Law, reply: target_pb2.GetModelInfoResponse) -> None:
    """Refuse a target that would end, check or draw texts in another way than others do.

    Raises:
        Unavailable: what differs.
    """
    for name, value in law_of(reply).items():
        if value != law[name]:
            raise Unavailable(
                f"a target ({reply.info.model}) waits, for it differs from the others in {name}:"
                f" {value} and {law[name]}; texts begin with what most targets serve"
            )


def rules_of(
    target: target_pb2.GetModelInfoResponse,
    drafters: Sequence[drafter_pb2.GetModelInfoResponse],
    *,
    lossy: bool = False,
) -> dict[str, Rule]:
    """The target's rules that the drafts of every drafter suit, by name.

    A rule takes drafts of a shape, and one that needs every draft takes pure ones only: of its
    three fields in the handshake, `fixed_gamma` is read. Those that change the law of the text are
    left out unless they are allowed (`lossy`).
    """
    pure = all(reply.pure for reply in drafters)
    return {
        info.name: Rule(info.name, info.fixed_gamma, _options_of(info))
        for info in sorted(target.verifiers, key=lambda info: info.name)
        if all(_takes(info.takes, reply.shape) for reply in drafters)
        and (pure or not info.fixed_gamma)
        and (lossy or info.lossless)
    }


def _options_of(info: target_pb2.VerifierInfo) -> dict[str, tuple[float, float, float]]:
    return {each.name: (each.default, each.least, each.most) for each in info.options}


def _takes(rule: common_pb2.DraftShape.ValueType, drafter: common_pb2.DraftShape.ValueType) -> bool:
    """Every rule takes chains; one for trees takes independent chains too."""
    return drafter in (common_pb2.DRAFT_SHAPE_CHAIN, rule) or rule == common_pb2.DRAFT_SHAPE_TREE


def wish_from(reply: drafter_pb2.GetModelInfoResponse) -> FeedbackWanted | None:
    """What a drafter wants of a target; None where the dtype of its states is not known."""
    wanted = spec_from(reply.feedback, reply.info.hidden_size)
    if wanted is None:
        return None
    return replace(
        wanted, probes=reply.probes, probe_tokens=reply.probe_tokens, made_for=reply.made_for
    )


def feedback_of_all(drafters: Sequence[drafter_pb2.GetModelInfoResponse]) -> FeedbackWanted:
    """What a text says for all of them, and the most that a draft needs of a target."""
    return united([wanted for reply in drafters if (wanted := wish_from(reply)) is not None])


def first_that_asks(
    drafters: Sequence[drafter_pb2.GetModelInfoResponse],
) -> drafter_pb2.GetModelInfoResponse | None:
    """The drafter whose feedback a text says for all; None where none wants any."""
    return next((reply for reply in drafters if (w := wish_from(reply)) and w.asks), None)


def require_same_feedback(
    first: drafter_pb2.GetModelInfoResponse | None, reply: drafter_pb2.GetModelInfoResponse
) -> None:
    """Refuse a drafter that wants other feedback than a text says for all.

    Args:
        first: see `first_that_asks`.
        reply: of a drafter that fits.

    Raises:
        Unavailable: it does.
    """
    wanted, known = wish_from(reply), None if first is None else wish_from(first)
    if first is None or wanted is None or known is None:
        return
    if not wanted.asks or wanted.said == known.said:
        return
    who = f"a drafter ({reply.info.model})"
    # With ONLINE a head reads predictions too.
    if wanted.layers and reply.learns != first.learns and wanted.at_open.said == known.at_open.said:
        raise Unavailable(
            f"{who} {'learns' if reply.learns else 'does not learn'}, unlike the first one that"
            " reads the same hidden states: set ONLINE for all of them, or for none"
        )
    if reply.learns and known.layers and not wanted.layers:
        raise Unavailable(
            f"{who} learns and reads no hidden states, and the first one reads some, as heads do:"
            " set its ONLINE=0, or give it an orchestrator of its own"
        )
    if first.learns and wanted.layers and not known.layers:
        raise Unavailable(
            f"{who} reads hidden states, as heads do, and the first one ({first.info.model}) learns"
            " and reads none: set ONLINE=0 there, or give it an orchestrator of its own"
        )
    raise Unavailable(
        f"{who} reads other hidden states or predictions than the first one does: drafters that"
        " read any must read the same"
    )


_ENTRY_BYTES = 6


def longest_draft(
    target: common_pb2.ModelInfo, drafters: Sequence[drafter_pb2.GetModelInfoResponse]
) -> int:
    """The longest path of a draft, chosen so that each draft fits the target's largest message.

    It has to be chosen beforehand: a draft that was left out for what it turned out to be would
    bias the text.

    Raises:
        Unavailable: not even one token's row fits.
    """
    longest = target.max_gamma
    for place, reply in enumerate(drafters, 1):
        fitting = _rows_that_fit(target, place, reply)
        if reply.probes and reply.shape not in _TREES:
            fitting = min(fitting, target.max_nodes - feedback_of_all(drafters).probes)
        longest = min(longest, reply.info.max_gamma, fitting)
    return longest if drafters else 0


def largest_tree(
    target: common_pb2.ModelInfo, drafters: Sequence[drafter_pb2.GetModelInfoResponse]
) -> int:
    """The most tokens of a tree, chosen as the longest path is; 0 where all drafts are chains.

    Raises:
        Unavailable: as `longest_draft`.
    """
    room = target.max_nodes - feedback_of_all(drafters).probes
    found = [
        min(room, reply.info.max_nodes, _rows_that_fit(target, place, reply))
        for place, reply in enumerate(drafters, 1)
        if reply.shape in _TREES
    ]
    return min(found, default=0)


def _rows_that_fit(
    target: common_pb2.ModelInfo, place: int, reply: drafter_pb2.GetModelInfoResponse
) -> int:
    """How many of a drafter's rows a message to the target holds."""
    if not reply.info.parameters:
        # Certain tokens, without rows; or rows of what a target told, at most some kilobytes each.
        return target.max_message_bytes // (_ENTRY_BYTES * max(reply.feedback.top, 1))
    width = min(reply.draft_support or reply.info.vocab_size, reply.info.vocab_size)
    fitting = (target.max_message_bytes - AROUND_BYTES) // (_ENTRY_BYTES * width)
    if fitting < 1:
        raise Unavailable(
            f"drafter {place} sends rows of {width} tokens, more than the target takes in a"
            " message: raise MAX_MESSAGE_MIB of the target or lower DRAFT_SUPPORT"
        )
    return fitting


def common_limits(replicas: Sequence[common_pb2.ModelInfo]) -> common_pb2.ModelInfo:
    """The first replica, with limits that any of them keeps: a text may go to each; and the most
    changes of weights that one of them has had."""
    info = common_pb2.ModelInfo()
    info.CopyFrom(replicas[0])
    for name in ("max_length", "max_gamma", "max_nodes", "max_sequences", "max_message_bytes"):
        setattr(info, name, min(getattr(replica, name) for replica in replicas))
    bounded = [replica.cache_tokens for replica in replicas if replica.cache_tokens]
    info.cache_tokens = min(bounded, default=0)
    info.weights_version = max(replica.weights_version for replica in replicas)
    info.ClearField("incarnation")  # several replicas have several
    return info


def longest_text(info: common_pb2.ModelInfo, nodes: int) -> int:
    """Tokens of a sequence, with room in the cache for the nodes of its drafts."""
    limit = int(info.max_length)
    return min(limit, max(int(info.cache_tokens) - nodes, 0)) if info.cache_tokens else limit


@contextmanager
def noting(address: str) -> Iterator[None]:
    """Note the address of what is refused inside the block: for our log, not for clients."""
    try:
        yield
    except Unavailable as error:
        error.add_note(address)
        raise


# Of a service's; more would only take time.
_MOST_PASSES = 64
_LIMITS = ("max_length", "max_gamma", "max_nodes", "max_message_bytes")


def own_drafters(
    targets: Sequence[target_pb2.GetModelInfoResponse],
) -> list[drafter_pb2.GetModelInfoResponse]:
    """What targets draft themselves, each described as a drafter is; none unless all of them do."""
    if not all(reply.HasField("drafts") for reply in targets):
        return []
    probes = max(reply.drafts.probes for reply in targets)
    if probes and min(reply.info.max_nodes for reply in targets) <= probes:
        return []  # a text may have to move to a target that has no room for its probes
    return [
        drafter_pb2.GetModelInfoResponse(
            # Without a vocabulary: no row of theirs is ever in a message.
            info=common_pb2.ModelInfo(
                model=own.drafter,
                fingerprint=own.fingerprint,
                max_gamma=own.max_gamma,
                max_nodes=own.max_nodes,
                max_length=own.max_length,
                # What it can hold of a text.
                cache_tokens=own.held_length,
                pass_times=own.pass_times,
            ),
            drafter=own.drafter,
            shape=own.shape,
            pure=own.pure,
            recipe=own.recipe,
            probes=own.probes,
        )
        for own in (reply.drafts for reply in targets)
    ]


@dataclass(frozen=True)
class Capabilities:
    """A text's view of the pool, from its start to its end.

    Attributes:
        target: what the targets serve, with the least limits of them all.
        drafter: the same of what drafts; None without drafts.
        largest: draft that every replica can make and take; of no tokens without drafters.
        max_rounds: without drafts that every target takes ahead.
        rules: that the targets know and the drafters suit, by name.
        recipes: of the drafters, each once, as JSON.
        law: that every target of it has.
        by_target: the targets draft themselves: no drafter is asked.
        feedback: that drafters want of the target, with the most probes of a draft.
        without_drafters: the same targets where they draft themselves, for texts that lose their
            drafters; None where they do not, or do so anyway.
        prepares: some drafter prepares drafts.
    """

    target: common_pb2.ModelInfo
    drafter: common_pb2.ModelInfo | None
    largest: DraftSize
    max_rounds: int
    rules: Mapping[str, Rule]
    law: Law
    recipes: tuple[str, ...] = ()
    by_target: bool = False
    without_drafters: Capabilities | None = None
    feedback: FeedbackWanted = NO_FEEDBACK
    prepares: bool = False

    @property
    def beside(self) -> int:
        """Nodes that a text's opening announces beside those of its trees: for probes, and for the
        chain that they hang at; whichever service drafts."""
        probes = self.feedback.probes
        own = probes and probes + (0 if self.largest.nodes else self.largest.gamma)
        others = 0 if self.without_drafters is None else self.without_drafters.beside
        return max(own, others)

    @property
    def pass_times(self) -> Iterator[Sequence[PassTime]]:
        """What the target's passes take, and the drafter's."""
        for info in (self.target, self.drafter or common_pb2.ModelInfo()):
            yield [
                (each.sequences, each.rows, each.nanoseconds)
                for each in info.pass_times[:_MOST_PASSES]
            ]

    @property
    def pair(self) -> tuple[Law, str | None]:
        """The target's law and the drafter's fingerprint: what texts learn holds for these."""
        return self.law, None if self.drafter is None else self.drafter.fingerprint

    def takes(self, reply: target_pb2.GetModelInfoResponse) -> bool:
        """Whether a target can go on with any text that began with these."""
        kept = [getattr(reply.info, limit) >= getattr(self.target, limit) for limit in _LIMITS]
        kept.append(reply.max_rounds >= self.max_rounds)
        kept.append(not misfit(self.feedback, _given_by(reply)))
        own = self if self.by_target else self.without_drafters
        if own is not None:
            kept += [reply.drafts.max_gamma >= own.largest.gamma]
            kept += [reply.drafts.max_nodes >= own.largest.nodes]
            kept += [reply.drafts.probes <= own.feedback.probes]
        return law_of(reply) == self.law and all(kept)

    def own_size(self, size: DraftSize) -> DraftSize:
        """What a target drafts itself where a draft of a size is wanted; of no tokens where it
        cannot."""
        most = self.largest
        gamma, nodes = min(size.gamma, most.gamma), min(size.nodes, most.nodes)
        return DraftSize(0) if most.nodes and not nodes else DraftSize(gamma, nodes)


def capabilities_of(
    targets: Sequence[target_pb2.GetModelInfoResponse],
    drafters: Sequence[drafter_pb2.GetModelInfoResponse],
    own: Sequence[drafter_pb2.GetModelInfoResponse] = (),
    *,
    lossy: bool = False,
) -> Capabilities:
    """What replicas offer that fit together; at least one target.

    Args:
        targets: that serve texts of one law; at least one.
        drafters: that draft for them; without any, what they draft themselves is used.
        own: what they draft themselves, see `own_drafters`; none where that is not wanted.
        lossy: whether rules that change the law of the text are offered.

    Raises:
        Unavailable: no draft of a drafter fits the targets' messages.
    """
    without_drafters = None
    if drafters and own:
        without_drafters = capabilities_of(targets, (), own, lossy=lossy)
    by_target, drafters = not drafters and bool(own), drafters or own
    target = common_limits([reply.info for reply in targets])
    return Capabilities(
        target=target,
        drafter=common_limits([reply.info for reply in drafters]) if drafters else None,
        largest=DraftSize(longest_draft(target, drafters), largest_tree(target, drafters)),
        max_rounds=min(reply.max_rounds for reply in targets),
        rules=rules_of(targets[0], drafters, lossy=lossy),
        law=law_of(targets[0]),
        recipes=tuple(dict.fromkeys(reply.recipe for reply in drafters if reply.recipe)),
        by_target=by_target,
        without_drafters=without_drafters,
        feedback=feedback_of_all(drafters),
        prepares=any(reply.ahead for reply in drafters),
    )
