"""Intervals against scipy, verdicts never stronger than the interval."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from wellcond.statistics import Estimate, estimate, paired_difference, verdict

numbers = st.floats(-100, 100, allow_nan=False)


@settings(deadline=None)
@given(st.lists(numbers, min_size=2, max_size=8).filter(lambda v: float(np.std(v)) > 1e-3))
def test_the_interval_is_scipys_t_interval(values: list[float]) -> None:
    found = estimate(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.n, found.mean) == (len(values), pytest.approx(np.mean(values), abs=1e-9))
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_the_verdict_agrees_with_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    arm, base = (dict(enumerate(side)) for side in zip(*pairs, strict=True))
    differences = [a - b for a, b in pairs]
    if float(np.std(differences)) < 1e-3:
        return
    p = stats.ttest_rel(list(arm.values()), list(base.values())).pvalue
    if abs(p - 0.05) < 1e-6:
        return
    found = verdict(paired_difference(arm, base), higher_is_better=True)
    if p > 0.05:
        assert found == "no difference shown at 95 %"
    else:
        assert found == ("better" if np.mean(differences) > 0 else "worse")


def test_by_hand() -> None:
    found = paired_difference({0: 2.0, 1: 4.0, 2: 9.0, 7: 100.0}, {2: 3.0, 1: 2.0, 0: 1.0, 8: -5.0})
    assert found is not None  # differences 1, 2, 6
    deviation = math.sqrt(7.0)
    half = 4.302652729911275 * deviation / math.sqrt(3)
    assert found == Estimate(
        3, pytest.approx(3.0), pytest.approx(3 - half), pytest.approx(3 + half), pytest.approx(3 / deviation)
    )


def test_seeds_are_paired_by_number_not_by_position() -> None:
    found = paired_difference({1: 10.0, 0: 20.0}, {0: 19.0, 1: 9.0})
    assert found is not None
    assert (found.low, found.high, found.effect) == (1.0, 1.0, None)


def test_lower_is_better() -> None:
    gain = Estimate(3, -1.0, -1.5, -0.5)
    assert verdict(gain, higher_is_better=False) == "better"
    assert verdict(gain, higher_is_better=True) == "worse"


def test_an_interval_that_touches_zero_shows_nothing() -> None:
    assert verdict(Estimate(3, 1.0, 0.0, 2.0), higher_is_better=True) == "no difference shown at 95 %"


def test_no_common_seed_and_one_seed() -> None:
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert verdict(None, higher_is_better=True) == "not compared"
    assert verdict(paired_difference({0: 2.0}, {0: 1.0}), higher_is_better=True) == "one seed shows nothing"
    with pytest.raises(ValueError, match="at least one finished run"):
        estimate([])
