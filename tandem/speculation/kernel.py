"""CPU kernels, compiled from Python by numba, for work whose cost is mostly torch's overhead.

A draw or a verdict of one text takes dozens of torch operators, at a few microseconds each whatever
they compute. Compiled, it is one call. The plain torch code remains the reference: devices run it,
and tests compare the kernels with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

# Fast-math flags for sums in any order, which can be vectorised. They keep NaN and infinity intact.
_ANY_ORDER = {"reassoc", "nsz"}


def kernel(
    signature: Any = None, *, any_order: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function: now if its signature is given, else when it is first used.

    Compiled code is cached next to the source, or in the user's cache directory, so that only the
    first start takes seconds. If neither can be written, each start does.

    Args:
        signature: numba's, for functions called from Python; others are called by kernels only.
        any_order: whether sums may be computed in any order.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            made: Callable[..., Any] = _jit(function, signature, any_order, cache=True)
        except RuntimeError:  # the cache cannot be written
            made = _jit(function, signature, any_order, cache=False)
        return made

    return compiled


def _jit(function: Callable[..., Any], signature: Any, any_order: bool, cache: bool) -> Any:
    fastmath = _ANY_ORDER if any_order else False
    options: dict[str, Any] = {"fastmath": fastmath, "nogil": True, "cache": cache}
    if signature is not None:
        return numba.njit(signature, **options)(function)
    # Skip the wrappers for calls from Python and C, which take time to compile.
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


def readonly(dtype: Any, dimensions: int = 1) -> Any:
    """The type of a contiguous read-only array, such as one made from received bytes."""
    return numba.types.Array(dtype, dimensions, "C", readonly=True)
