"""Between the target's messages and the domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest
from tandem.rpc import messages
from tandem.target.v1 import target_pb2
from tandem.verification import Verifier
from target_svc.rules import BUILT_IN, Rules


def verifier_infos(rules: Rules = BUILT_IN) -> list[target_pb2.VerifierInfo]:
    """What each rule says of itself."""
    return [
        target_pb2.VerifierInfo(
            name=rule.name,
            lossless=rule.lossless,
            takes=messages.shape_to(rule.takes),
            needs_pure=rule.needs_every_draft,
            fixed_gamma=rule.needs_every_draft,
            resumable=not rule.needs_every_draft,
            options=[target_pb2.VerifierOption(**option._asdict()) for option in rule.options],
        )
        for _, rule in sorted(rules.items())
    ]


def rule_from(request: target_pb2.OpenSequence, rules: Rules) -> Verifier[Any]:
    """The rule that decides a text.

    Args:
        request: names it.
        rules: that the target offers.

    Raises:
        InvalidRequest: there is none of that name, or it has no such options.
    """
    rule = rules.get(request.verifier)
    if rule is None:
        raise InvalidRequest(
            f"open.verifier {request.verifier!r} is unknown; use one of {sorted(rules)}"
        )
    try:
        return rule.with_options(dict(request.verifier_options))
    except ValueError as error:
        raise InvalidRequest(f"open.verifier_options: {error}") from None


def carry_from(message: common_pb2.VerifierCarry, rule: Verifier[Any], gamma: int) -> Any:
    """A rule's state, as another target returned it; None for no state.

    Raises:
        InvalidRequest: the rule cannot have such a state.
    """
    if len(message.levels) > gamma:
        raise InvalidRequest(f"open.carry holds {len(message.levels)} levels, gamma allows {gamma}")
    levels = [(level.log_ratio, level.count) for level in message.levels]
    try:
        return rule.carry_from(levels, gamma)
    except ValueError as error:
        raise InvalidRequest(f"open.carry: {error}") from None


def carry_to(levels: Sequence[tuple[float, int]]) -> common_pb2.VerifierCarry | None:
    """A rule's state as it travels; None where there is none."""
    if not levels:
        return None
    return common_pb2.VerifierCarry(
        levels=[
            common_pb2.VerifierCarry.Level(log_ratio=log_ratio, count=count)
            for log_ratio, count in levels
        ]
    )
