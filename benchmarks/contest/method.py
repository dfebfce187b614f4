"""The ways to decode that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Of the target, and behind a slash of the drafter where it has another: a CPU may compute a
# large model faster in bfloat16 and a small one in float32.
DTYPES = ("float32", "bfloat16", "bfloat16/float32")
VERIFIERS = ("token", "block", "greedy_block")


def dtypes_of(dtype: str) -> tuple[str, str]:
    """The target's and the drafter's."""
    target, _, drafter = dtype.partition("/")
    return target, drafter or target


class System(StrEnum):
    """Who decodes."""

    GENERATE = "transformers generate"
    ASSISTED = "transformers assisted"
    ASSISTED_DEFAULTS = "transformers assisted, defaults"
    TANDEM = "Tandem"


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        system: who decodes.
        dtype: one of DTYPES.
        gamma: draft length; 0 decodes plainly, None is up to transformers.
        verifier: of Tandem, where it drafts.
    """

    system: System
    dtype: str
    gamma: int | None = 0
    verifier: str = ""

    def __str__(self) -> str:
        return f"{self.system} {self.verifier}".strip() if self.gamma else str(self.system)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.gamma == 0


def baseline_methods(gammas: Sequence[int], dtypes: Sequence[str]) -> Iterator[Method]:
    """What transformers offers, its own choice of draft lengths included."""
    for dtype in dtypes:
        if "/" not in dtype:
            yield Method(System.GENERATE, dtype)
        for gamma in gammas:
            yield Method(System.ASSISTED, dtype, gamma)
        yield Method(System.ASSISTED_DEFAULTS, dtype, None)


def tandem_methods(gammas: Sequence[int], dtype: str) -> Iterator[Method]:
    """Plain decoding, and every verifier at every draft length."""
    yield Method(System.TANDEM, dtype)
    for verifier in VERIFIERS:
        for gamma in gammas:
            yield Method(System.TANDEM, dtype, gamma, verifier)
