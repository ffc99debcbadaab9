"""Arms against each other, not only against the baseline: a control that explains a gain must not be missed."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import numpy as np

from wellcond.report.folder import Difference, RunFolder


@dataclasses.dataclass(frozen=True)
class Pair:
    """``first`` minus ``second``, paired over the seeds that both have finished."""

    first: str
    second: str
    seeds: int
    difference: Difference


def pairs(run: RunFolder) -> list[Pair]:
    """Every two arms besides the baseline, in the order of the arms; pairs without a common seed are left out."""
    metric = run.metric.name
    values = {
        arm.name: {seed: result.metrics[metric] for seed, result in run.results_of(arm.name).items()}
        for arm in run.arms
        if arm.name != run.baseline.name
    }
    found = []
    for first, second in combinations(values, 2):
        shared = sorted(values[first].keys() & values[second].keys())
        if shared:
            gaps = [values[first][seed] - values[second][seed] for seed in shared]
            found.append(Pair(first, second, len(shared), paired_difference(gaps)))
    return found


def paired_difference(gaps: list[float]) -> Difference:
    """Mean of paired differences with its 95 % interval by Student's t and the effect size mean/deviation.

    One difference has no interval; differences that are all equal have an interval of no width.

    >>> found = paired_difference([1.0, 2.0, 3.0])
    >>> round(found.low, 3), found.mean, round(found.high, 3), found.effect
    (-0.484, 2.0, 4.484, 2.0)
    """
    from scipy import stats

    mean = float(np.mean(gaps))
    if len(gaps) == 1:
        return Difference(mean)
    deviation = float(np.std(gaps, ddof=1))
    half = float(stats.t.ppf(0.975, len(gaps) - 1)) * deviation / len(gaps) ** 0.5
    return Difference(mean, mean - half, mean + half, mean / deviation if deviation else None)
