"""Intervals of means, and paired tests of two methods on the same records. Everything is exact or seeded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_cli.lab.reports.bench_data import SIGNIFICANT, Interval, PairedTest

RESAMPLES = 10_000
CHUNK = 2_000_000  # numbers that are drawn at once
NORMAL_975 = 1.959963984540054  # quantile of the standard normal distribution
ROUNDING = 1e-9


def yes_or_no(values: Sequence[float]) -> bool:
    """Return whether every score is 0 or 1."""
    return all(value in (0.0, 1.0) for value in values)


def score_interval(values: Sequence[float]) -> Interval:
    """Return the mean of at least one score and its 95 % interval: Wilson's where each is 0 or 1, else by bootstrap."""
    return wilson(round(sum(values)), len(values)) if yes_or_no(values) else bootstrap_mean(values)


def wilson(right: int, count: int) -> Interval:
    """Return the share of `right` among `count` (1 or more) and its 95 % score interval (Wilson 1927)."""
    share, square = right / count, NORMAL_975**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = NORMAL_975 * math.sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    # at 0 and 1 the limit is the share itself, which rounding would miss
    low = 0.0 if right == 0 else centre - half
    return Interval(share, low, 1.0 if right == count else centre + half)


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % percentile bootstrap interval over the values (at least one)."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = [data[rng.integers(0, len(data), (rows, len(data)))].mean(axis=1) for rows in _blocks(len(data))]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(data.mean()), float(low), float(high))


def middle_half(values: Sequence[float]) -> Interval:
    """Return the median and quartiles of at least one value."""
    low, median, high = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))
    return Interval(float(median), float(low), float(high))


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p value of the discordant records, of which each would be better or worse with equal
    chance if the methods did not differ (McNemar 1947)."""
    count = better + worse
    tail = sum(math.comb(count, wins) for wins in range(min(better, worse) + 1))
    return float(min(1.0, 2 * tail / 2**count))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the two-sided p value of a mean difference where each sign is as likely as the other (Fisher's
    randomisation).

    The value is exact where there are at most RESAMPLES patterns of signs. Otherwise it comes from RESAMPLES seeded
    patterns and the observed one.
    """
    data = np.asarray([value for value in differences if value], dtype=np.float64)
    least = abs(data.sum()) - ROUNDING
    if 2 ** len(data) <= RESAMPLES:
        patterns = np.arange(2 ** len(data))[:, None] >> np.arange(len(data)) & 1
        return float(_extreme(patterns, data, least) / len(patterns))
    rng = np.random.default_rng(0)
    hits = [_extreme(rng.integers(0, 2, (rows, len(data))), data, least) for rows in _blocks(len(data))]
    return (1 + sum(hits)) / (1 + RESAMPLES)


def _extreme(patterns: NDArray[np.int64], data: NDArray[np.float64], least: float) -> int:
    """Count the patterns [rows, records] of 0 and 1, as signs, whose sum over `data` is at least `least` from 0."""
    return int((np.abs((2 * patterns - 1) @ data) >= least).sum())


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p values of several tests so that each may be read alone (Holm 1979)."""
    adjusted, highest = [1.0] * len(values), 0.0
    for done, index_of_value in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        highest = max(highest, min(1.0, (len(values) - done) * values[index_of_value]))
        adjusted[index_of_value] = highest
    return adjusted


def paired_tests(pairs: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> list[PairedTest]:
    """Compare several methods on the same records, with Holm's correction over all of them.

    pairs: for each method the name of the baseline's setting, the method's scores and the baseline's scores, record by
    record (at least one).
    """
    tests, values = [], []
    for _, mine, other in pairs:
        differences = [value - base for value, base in zip(mine, other, strict=True)]
        better = sum(difference > ROUNDING for difference in differences)
        worse = sum(difference < -ROUNDING for difference in differences)
        exact = yes_or_no(mine) and yes_or_no(other)
        values.append(mcnemar(better, worse) if exact else sign_flip(differences))
        tests.append((better, worse, math.fsum(differences) / len(differences), "mcnemar" if exact else "sign-flip"))
    return [
        PairedTest(base, len(mine), better, worse, difference, test, p, adjusted, least_records(len(pairs)))
        for (base, mine, _), (better, worse, difference, test), p, adjusted in zip(
            pairs, tests, values, holm(values), strict=True
        )
    ]


def least_records(tests: int) -> int:
    """Return how many records must differ, all one way, for the least p value of `tests` tests to be significant."""
    count = 1
    while tests * mcnemar(count, 0) >= SIGNIFICANT:
        count += 1
    return count


def _blocks(columns: int) -> Iterator[int]:
    """Yield numbers of rows that sum to RESAMPLES. Rows of `columns` numbers make a block of CHUNK numbers at most."""
    block = max(1, CHUNK // columns)
    for start in range(0, RESAMPLES, block):
        yield min(block, RESAMPLES - start)
