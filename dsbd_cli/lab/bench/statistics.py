"""Medians, quartiles and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_cli.lab.reports.bench_data import Interval

__all__ = ["bootstrap_mean", "middle_half"]

RESAMPLES = 10_000
CHUNK = 2_000_000


def bootstrap_mean(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean and its 95 % percentile bootstrap interval over the values (at least one)."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    block = max(1, CHUNK // len(data))
    means = [
        data[rng.integers(0, len(data), (min(block, resamples - start), len(data)))].mean(axis=1)
        for start in range(0, resamples, block)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(data.mean()), float(low), float(high))


def middle_half(values: Sequence[float]) -> Interval:
    """Median and quartiles of at least one value."""
    low, median, high = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))
    return Interval(float(median), float(low), float(high))
