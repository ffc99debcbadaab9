"""Arms against each other, not only against the baseline: a control that explains a gain must not be missed."""

from __future__ import annotations

import dataclasses
from itertools import combinations

from wellcond.report.folder import Difference, RunFolder
from wellcond.statistics import paired_difference


@dataclasses.dataclass(frozen=True)
class Pair:
    """``first`` minus ``second``, paired over the seeds that both have finished."""

    first: str
    second: str
    seeds: int
    difference: Difference


def pairs(run: RunFolder) -> list[Pair]:
    """Every two arms besides the baseline, in the order of the arms; pairs without a common seed are left out.

    The statistics are those of the table: one definition of a paired difference for all of wellcond.
    """
    metric = run.metric.name
    values = {
        arm.name: {seed: result.metrics[metric] for seed, result in run.results_of(arm.name).items()}
        for arm in run.arms
        if arm.name != run.baseline.name
    }
    found = []
    for first, second in combinations(values, 2):
        estimate = paired_difference(values[first], values[second])
        if estimate is not None:
            difference = Difference(estimate.mean, estimate.low, estimate.high, estimate.effect, estimate.n)
            found.append(Pair(first, second, estimate.n, difference))
    return found
