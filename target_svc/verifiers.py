"""The rules that a target knows; they live in `tandem.verification`."""

from tandem.verification import VERIFIERS, Verifier

__all__ = ["VERIFIERS", "Verifier"]
