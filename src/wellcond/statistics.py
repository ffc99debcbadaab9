"""Intervals over seeds, paired differences, and a verdict that is never stronger than they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over n seeds with its 95 % t interval; None where one seed gives none.

    ``effect`` is Cohen's d of paired differences, mean/standard deviation; None for a plain mean.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    effect: float | None = None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval of independent values (Student, two-sided, n−1 degrees of freedom).

    Raises ValueError without values.

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(n=3, mean=2.0, low=-0.484..., high=4.484..., effect=None)
    """
    if not len(values):
        raise ValueError("no values: a mean needs at least one finished run")
    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    if len(sample) == 1:
        return Estimate(1, mean, None, None)
    error = float(stats.sem(sample))
    half = error * float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(sample) - 1))
    return Estimate(len(sample), mean, mean - half, mean + half)


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> Estimate | None:
    """The difference to the baseline over the seeds that both finished; None if there is none in common.

    >>> paired_difference({0: 2.0, 1: 3.0, 2: 5.0}, {0: 1.0, 1: 2.0, 2: 3.0}).mean
    1.333...
    """
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    differences = [values[seed] - baseline[seed] for seed in seeds]
    found = estimate(differences)
    spread = float(np.std(differences, ddof=1)) if len(differences) > 1 else 0.0
    return dataclasses.replace(found, effect=found.mean / spread if spread > 0 else None)


def verdict(difference: Estimate | None, *, higher_is_better: bool) -> str:
    """ "better", "worse" or "no difference shown at 95 %", by whether the interval excludes zero.

    >>> verdict(Estimate(3, 1.0, 0.5, 1.5), higher_is_better=True)
    'better'
    >>> verdict(Estimate(1, 1.0, None, None), higher_is_better=True)
    'one seed shows nothing'
    """
    if difference is None:
        return "not compared"
    if difference.low is None or difference.high is None:
        return "one seed shows nothing"
    if difference.low <= 0.0 <= difference.high:
        return "no difference shown at 95 %"
    return "better" if (difference.mean > 0) == higher_is_better else "worse"
