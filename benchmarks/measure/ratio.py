"""A ratio of sums over texts, which are the independent samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float]:
    """A ratio of sums over texts, and its standard error (delta method)."""
    top, bottom = np.array(numerators, dtype=float), np.array(denominators, dtype=float)
    value = top.sum() / bottom.sum()
    residuals = top - value * bottom
    error = np.sqrt((residuals**2).sum() * len(top) / (len(top) - 1)) / bottom.sum()
    return float(value), float(error)
