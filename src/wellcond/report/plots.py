"""Which plots a report has, with the caption and the text alternative of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from wellcond.report.compared import (
    bars_figure,
    curves_figure,
    difference_intervals,
    difference_unit,
    intervals_figure,
    metric_intervals,
)
from wellcond.report.folder import Result, RunFolder
from wellcond.report.kappas import Array, Panel
from wellcond.report.measured import spectrum_figure
from wellcond.report.prefix import prefix_figure, prefix_lines
from wellcond.report.style import Mark, Theme, marks, short


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure that can be drawn on any theme. ``name`` becomes its file name."""

    name: str
    caption: str
    alt: str
    draw: Callable[[Theme], Figure]


def result_plots(run: RunFolder) -> Iterator[Plot]:
    """The metric of every arm, and the paired differences where there are any."""
    metric = run.metric
    better = "higher is better" if metric.higher_is_better else "lower is better"
    seeds = {
        arm.name: {seed: result.metrics[metric.name] for seed, result in run.results_of(arm.name).items()}
        for arm in run.arms
    }
    unit = f"{metric.name}{f' ({metric.unit})' if metric.unit else ''}, {better}"
    means = metric_intervals(run.table)
    yield Plot(
        "result",
        f"{metric.name.capitalize()} of every arm: a dot per seed, the mean"
        + (" (one seed: no interval)." if _one_seed(run) else ", its 95 % interval as a bar."),
        f"{metric.name} by arm: " + ", ".join(f"{arm} {short(value[0])}" for arm, value in means.items()),
        lambda theme: intervals_figure(
            metric.name.capitalize(), seeds, means, _look(run, theme), unit=unit, zero=False, theme=theme
        ),
    )
    differences = difference_intervals(run.table)
    if differences:
        base = seeds[run.baseline.name]
        paired = {
            arm: {seed: value - base[seed] for seed, value in seeds[arm].items() if seed in base}
            for arm in differences
        }
        yield Plot(
            "difference",
            f"Paired difference to {run.baseline.name}, seed by seed"
            + (" (one seed: no interval)." if _one_seed(run) else ". A bar that crosses zero shows no difference."),
            f"difference of {metric.name} to {run.baseline.name}: "
            + ", ".join(f"{arm} {short(value[0])}" for arm, value in differences.items()),
            lambda theme: intervals_figure(
                f"Difference to {run.baseline.name}", paired, differences, _look(run, theme),
                unit=", ".join(filter(None, [difference_unit(metric), better])), zero=True, theme=theme,
            ),
        )  # fmt: skip


def prefix_plots(run: RunFolder) -> Iterator[Plot]:
    """Whole and prefix-only loss of every arm, where runs were scored from prefixes."""
    lines = prefix_lines(run)
    if lines:
        values = ", ".join(
            f"{line.arm.name} {short(line.whole.mean)} and {short(line.prefix.mean)}" for line in lines
        )
        yield Plot(
            "prefix",
            "Loss at the same positions with the whole block in the model and from the prefix alone, means over seeds.",
            f"loss from whole blocks and from prefixes alone: {values}",
            lambda theme: prefix_figure(lines, theme=theme),
        )


def curve_plots(run: RunFolder) -> Iterator[Plot]:
    """A figure for each key that the learning curves have, the loss first."""
    keys = {key for result in run.results for point in result.curve for key in point} - {"step"}
    for key in sorted(keys, key=lambda key: (key != "loss", key)):
        name = key.replace("_", " ")
        curves = {arm.name: _curve(list(run.results_of(arm.name).values()), key) for arm in run.arms}
        present = {arm: curve for arm, curve in curves.items() if curve is not None}
        if not present:
            continue
        steps = {arm: curve[0] for arm, curve in present.items()}
        values = {arm: curve[1] for arm, curve in present.items()}
        gaps = sum(int((~np.isfinite(table)).sum()) for table in values.values())
        left_out = sum(curve[2] for curve in present.values())
        caption = f"{name.capitalize()} over training. {_band(run)}"
        if gaps:
            caption += f" {gaps} points are not finite: the line has gaps there."
        if left_out:
            caption += f" {left_out} steps that some seed lacks are left out."
        ends = ", ".join(f"{arm} {short(float(table[:, -1].mean()))}" for arm, table in values.items())
        yield Plot(
            f"curve {key}",
            caption,
            f"learning curves of {name}; at the last step: {ends}",
            partial(_draw_curves, run, name.capitalize(), name, steps, values, False),
        )


def _curve(results: list[Result], key: str) -> tuple[list[int], Array, int] | None:
    """Steps ``(S,)`` that every seed has, values ``(seeds, S)``, and how many steps are left out."""
    points = [
        {int(point["step"]): point[key] for point in result.curve if key in point} for result in results
    ]
    if not points or not all(points):
        return None
    shared = sorted(set.intersection(*map(set, points)))
    if not shared:
        return None
    table = np.array([[seed[step] for step in shared] for seed in points], dtype=np.float64)
    return shared, table, len(set.union(*map(set, points))) - len(shared)


def kappa_plots(run: RunFolder, panels: list[Panel]) -> Iterator[Plot]:
    """κ over training, a figure per quantity."""
    for data in panels:
        ends = ", ".join(f"{arm} {short(float(table[:, -1].mean()))}" for arm, table in data.values.items())
        steps = {arm: [int(step) for step in found] for arm, found in data.steps.items()}
        yield Plot(
            f"kappa {data.quantity}",
            f"{data.symbol} of: {data.title.lower()}. {_band(run)}{_remark(data)}",
            f"{data.symbol} over training, {data.title.lower()}; at the last measurement: {ends}",
            partial(_draw_curves, run, data.title, data.symbol, steps, data.values, True),
        )


def bar_plots(run: RunFolder, panels: list[Panel]) -> Iterator[Plot]:
    """The bars of the paper's Figures 2 to 4, a figure per quantity, all on one scale."""
    whiskers = "." if _one_seed(run) else "; whiskers reach from the smallest seed to the largest."
    means = [float(seeds.mean()) for data in panels for seeds in data.averages().values()]
    limit = max((mean for mean in means if np.isfinite(mean)), default=10.0)
    for data in panels:
        values = ", ".join(f"{arm} {short(float(seeds.mean()))}" for arm, seeds in data.averages().items())

        def draw(theme: Theme, data: Panel = data) -> Figure:
            return bars_figure(data, _look(run, theme), limit, theme=theme)

        yield Plot(
            f"bars {data.quantity}",
            f"{data.title}: mean {data.symbol} over training and seeds{whiskers}{_remark(data)}",
            f"bars of {data.symbol} averaged over training, {data.title.lower()}: {values}",
            draw,
        )


def spectrum_plots(run: RunFolder) -> Iterator[Plot]:
    """Singular values before and after, a figure per arm, all on one scale."""
    spectra = run.spectra or {}
    values = [value for s in spectra.values() for value in [*s.before, *(s.after or ())] if value > 0]
    limits = (min(values) / 1.6, max(values) * 1.6) if values else None
    for arm, sides in spectra.items():

        def draw(theme: Theme, arm: str = arm) -> Figure:
            found, mark = spectra[arm], _look(run, theme)[arm]
            return spectrum_figure(
                found.before, found.after, title=arm, colour=mark.colour, limits=limits, theme=theme
            )

        ends = f"σ₁ {short(max(sides.before))}, σₙ {short(min(sides.before))} before"
        if sides.after is not None:
            ends += f"; σ₁ {short(max(sides.after))}, σₙ {short(min(sides.after))} after"
        else:
            ends += "; nothing is corrected in this arm"
        yield Plot(f"spectrum {arm}", f"{arm}: {ends}.", f"singular values of {arm}: {ends}", draw)


def _look(run: RunFolder, theme: Theme) -> dict[str, Mark]:
    return marks([arm.name for arm in run.arms], run.baseline.name, theme)


def _draw_curves(
    run: RunFolder,
    title: str,
    label: str,
    steps: Mapping[str, list[int]],
    values: Mapping[str, Array],
    log: bool,
    theme: Theme,
) -> Figure:
    return curves_figure(title, label, steps, values, _look(run, theme), log=log, theme=theme)


def _one_seed(run: RunFolder) -> bool:
    return all(line.n == 1 for line in run.table.values())


def _band(run: RunFolder) -> str:
    if _one_seed(run):
        return "One seed, so no band."
    return "Lines are means over seeds; bands reach from the smallest seed to the largest."


def _remark(data: Panel) -> str:
    text = ""
    if data.infinite:
        text += (
            f" κ itself is infinite (a matrix is rank-deficient) in {', '.join(data.infinite)}, so this figure "
            f"shows κ⁺ = σ₁/σᵣ over the numerical rank r for every arm."
        )
    if any(not np.isfinite(table).all() for table in data.values.values()):
        text += " Some measurements are not finite: lines have gaps there, and no bar is drawn."
    if data.left_out:
        text += f" {data.left_out} steps that some seed lacks are left out."
    return text
