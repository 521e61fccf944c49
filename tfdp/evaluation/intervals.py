"""The percentile bootstrap: what perplexity and metrics per group share."""

from __future__ import annotations

import numpy as np

from tfdp.errors import DataError

RESAMPLES = 1000


def percentile_interval(resampled: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """The middle `confidence` of the values of a statistic on data that were drawn again.

    Args:
        resampled: one value for each time that the data were drawn again.
        confidence: above 0 and below 1.

    Raises:
        DataError: the confidence is none.
    """
    if not 0.0 < confidence < 1.0:
        raise DataError(f"Expected a confidence between 0 and 1. Received: {confidence!r}. Pass 0.95 for 95 percent.")
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return float(low), float(high)
