"""Kernels for a CPU, compiled from Python by numba: where a text alone waits for operators.

A draw or a verdict of one text takes dozens of operators of torch, of a few microseconds each
whatever they compute. Compiled, it is one call. The plain code stays the reference, what a device
runs, and what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

# Of what may add up in any order, and so be vectorised; what is not finite has to be noticed.
_ANY_ORDER = {"reassoc", "nsz"}


def kernel(
    signature: Any = None, *, any_order: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function, at once where its types are given, else where it is called.

    What was compiled is kept beside the source, or in the user's cache directory, so that only
    the first start takes seconds. Where neither can be written, each start does.

    Args:
        signature: numba's, of what is called from outside; others are called by kernels alone.
        any_order: whether its sums may be added up in another order than written.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            made: Callable[..., Any] = _jit(function, signature, any_order, cache=True)
        except RuntimeError:  # no place for the cache
            made = _jit(function, signature, any_order, cache=False)
        return made

    return compiled


def _jit(function: Callable[..., Any], signature: Any, any_order: bool, cache: bool) -> Any:
    fastmath = _ANY_ORDER if any_order else False
    options: dict[str, Any] = {"fastmath": fastmath, "nogil": True, "cache": cache}
    if signature is not None:
        return numba.njit(signature, **options)(function)
    # What Python and C would call takes time to compile.
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


def readonly(dtype: Any, dimensions: int = 1) -> Any:
    """The type of a contiguous array that is only read; arrays made of received bytes are."""
    return numba.types.Array(dtype, dimensions, "C", readonly=True)
