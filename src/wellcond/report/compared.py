"""Figures of a comparison: results, learning curves, κ over training, the bars of the paper's Figure 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from wellcond.report.folder import Line, Metric
from wellcond.report.kappas import Array, Panel
from wellcond.report.style import LIGHT, Mark, Theme, legend, panel, plain_log_ticks, short

Seeds = Mapping[int, float]


def _bars_height(count: int) -> float:
    return 1.15 + 0.42 * count


def intervals_figure(
    title: str,
    seeds: Mapping[str, Seeds],
    intervals: Mapping[str, tuple[float, float | None, float | None]],
    look: Mapping[str, Mark],
    *,
    unit: str,
    zero: bool,
    theme: Theme = LIGHT,
) -> Figure:
    """One line per arm: a faint dot per seed, the mean, and its 95 % interval where there is one.

    Args:
        title: above the axes.
        seeds: per arm the value of each seed.
        intervals: per arm mean, low and high; low and high are None with one seed.
        look: mark of every arm.
        unit: below the axis.
        zero: draw the line of no difference.
        theme: `LIGHT` or `DARK`.
    """
    figure, axes = panel(title, theme, height=_bars_height(len(intervals)), width=4.4)
    for place, (arm, (mean, low, high)) in enumerate(intervals.items()):
        mark = look[arm]
        values = list(seeds.get(arm, {}).values())
        axes.plot(
            values, [place - 0.27] * len(values), "o", color=mark.colour, alpha=0.6, markersize=4.5, mew=0
        )
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
            axes.plot([low, high], [place, place], color=mark.colour, linewidth=3, solid_capstyle="butt")
        axes.plot(mean, place, mark.marker, color=mark.colour, markersize=7.5, mec=theme.paper, mew=1)
    if zero:
        axes.axvline(0, color=theme.ink, linewidth=1.2, zorder=1)
    axes.set_yticks(range(len(intervals)), list(intervals))
    axes.set_ylim(len(intervals) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)
    axes.locator_params(axis="x", nbins=6)
    return figure


def curves_figure(
    title: str,
    label: str,
    steps: Mapping[str, Sequence[int]],
    values: Mapping[str, Array],
    look: Mapping[str, Mark],
    *,
    log: bool = False,
    theme: Theme = LIGHT,
) -> Figure:
    """Mean over seeds per arm with a band from the smallest seed to the largest.

    Args:
        title: above the axes.
        label: of the vertical axis.
        steps: per arm ``(S,)``.
        values: per arm ``(seeds, S)``; nan leaves a gap.
        look: mark of every arm.
        log: a log axis, for κ.
        theme: `LIGHT` or `DARK`.
    """
    figure, axes = panel(title, theme, height=3.4, width=4.0 if log else 4.4)
    if log:
        axes.set_yscale("log")
    for arm, table in values.items():
        mark, finite = look[arm], np.where(np.isfinite(table), table, np.nan)
        low, high = np.min(finite, axis=0), np.max(finite, axis=0)
        axes.fill_between(steps[arm], low, high, color=mark.colour, alpha=0.18, linewidth=0)
        every = max(1, len(steps[arm]) // 8)
        axes.plot(
            steps[arm], finite.mean(axis=0), color=mark.colour, linestyle=mark.dashes, linewidth=2,
            marker=mark.marker, markersize=4.5, markevery=every, label=arm,
        )  # fmt: skip
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label, rotation=0 if len(label) < 4 else 90, labelpad=8 if len(label) < 4 else 4)
    axes.yaxis.label.set_horizontalalignment("right" if len(label) < 4 else "center")
    axes.yaxis.label.set_fontsize(11.5 if len(label) < 4 else 9.5)
    axes.locator_params(axis="x", nbins=6)
    if log:
        low_end, high_end = axes.get_ylim()
        # κ ≥ 1: the axis starts there, so that the distance from perfect conditioning is what one sees.
        axes.set_ylim(0.9 if low_end < 12 else low_end, max(high_end, 10.0))
        plain_log_ticks(axes, "y")
    legend(figure, axes, theme)
    return figure


def bars_figure(
    data: Panel, look: Mapping[str, Mark], limit: float | None = None, *, theme: Theme = LIGHT
) -> Figure:
    """κ of one quantity averaged over training, one bar per arm: one pair of the paper's Figure 2.

    Bars start at κ = 1, perfect conditioning, on a log axis; whiskers go from the smallest seed to the largest.

    Args:
        data: the quantity for all arms.
        look: mark of every arm.
        limit: right end of the axis, to compare figures.
        theme: `LIGHT` or `DARK`.
    """
    averages = data.averages()
    figure, axes = panel(data.title, theme, height=_bars_height(len(averages)))
    axes.set_xscale("log")
    largest = max(
        (float(values.max()) for values in averages.values() if np.isfinite(values).all()), default=10.0
    )
    end = (limit or largest) ** 1.3 * 1.5
    for place, (arm, seeds) in enumerate(averages.items()):
        mean = float(seeds.mean())
        if math.isfinite(mean):
            axes.barh(place, mean - 1, left=1, height=0.62, color=look[arm].colour)
            if len(seeds) > 1:
                axes.plot([seeds.min(), seeds.max()], [place, place], color=theme.ink, linewidth=1.6)
            text = short(mean)
        else:
            text = "not finite"
        right = max(float(seeds.max()), 1.0) if math.isfinite(mean) else 1.0
        axes.annotate(
            text, (right, place), xytext=(6, 0), textcoords="offset points", va="center",
            color=theme.ink, fontsize=10.5, fontweight="bold",
        )  # fmt: skip
    axes.set_xlim(1, max(end, 10.0))
    axes.set_yticks(range(len(averages)), list(averages))
    axes.set_ylim(len(averages) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"mean {data.symbol}, log axis from 1")
    plain_log_ticks(axes, "x")
    return figure


def metric_intervals(table: Mapping[str, Line]) -> dict[str, tuple[float, float | None, float | None]]:
    """Mean and interval of every arm."""
    return {arm: (line.mean, line.low, line.high) for arm, line in table.items()}


def difference_intervals(table: Mapping[str, Line]) -> dict[str, tuple[float, float | None, float | None]]:
    """Paired difference and interval of every arm that has one."""
    return {
        arm: (line.difference.mean, line.difference.low, line.difference.high)
        for arm, line in table.items()
        if line.difference is not None
    }


def difference_unit(metric: Metric) -> str:
    """Differences of percentages are points.

    >>> difference_unit(Metric("accuracy", True, "%"))
    'points'
    """
    return "points" if metric.unit == "%" else metric.unit
