"""The loss of language models from whole blocks and from prefixes alone: what an arm owes to the future."""

from __future__ import annotations

import dataclasses

import numpy as np
from matplotlib.figure import Figure

from wellcond.report.folder import Arm, RunFolder
from wellcond.report.style import LIGHT, Theme, panel, short
from wellcond.statistics import Estimate, estimate, paired_difference

WHOLE, PREFIX = "whole_loss", "prefix_loss"


@dataclasses.dataclass(frozen=True)
class PrefixLine:
    """One arm; all losses are of the same sample of positions.

    Attributes:
        arm: which.
        whole: loss where each position is predicted while its whole block is in the model.
        prefix: loss where each position is predicted from its prefix alone.
        gap: ``prefix`` minus ``whole``, paired over seeds; 0 up to rounding where nothing leaks.
        difference: ``prefix`` minus the baseline's, paired over seeds; None for the baseline.
    """

    arm: Arm
    whole: Estimate
    prefix: Estimate
    gap: Estimate
    difference: Estimate | None


def prefix_lines(run: RunFolder) -> list[PrefixLine]:
    """A line for every arm whose runs were scored from prefixes; empty for other tasks."""
    scores: dict[str, tuple[dict[int, float], dict[int, float]]] = {}
    for arm in run.arms:
        results = run.results_of(arm.name)
        if results and all({WHOLE, PREFIX} <= set(result.metrics) for result in results.values()):
            whole, prefix = (
                {seed: result.metrics[name] for seed, result in results.items()} for name in (WHOLE, PREFIX)
            )
            scores[arm.name] = whole, prefix
    lines = []
    for arm in run.arms:
        if arm.name not in scores:
            continue
        whole, prefix = scores[arm.name]
        gap = paired_difference(prefix, whole)
        assert gap is not None
        base = scores.get(run.baseline.name)
        against = None if base is None or arm == run.baseline else paired_difference(prefix, base[1])
        lines.append(
            PrefixLine(arm, estimate(list(whole.values())), estimate(list(prefix.values())), gap, against)
        )
    return lines


def prefix_figure(
    lines: list[PrefixLine], *, title: str = "Loss, whole and prefix-only", theme: Theme = LIGHT
) -> Figure:
    """One line an arm: its loss from whole blocks (hollow) and from prefixes alone (filled), in nats, means over seeds.

    >>> arm, loss, gap = Arm("leaking", leaks=True), Estimate(1, 2.0, None, None), Estimate(1, 0.5, None, None)
    >>> line = PrefixLine(arm, loss, Estimate(1, 2.5, None, None), gap, None)
    >>> [text.get_text() for text in prefix_figure([line]).axes[0].texts]
    ['gap 0.5']
    """
    figure, axes = panel(title, theme, height=1.55 + 0.42 * len(lines), width=4.4)
    for place, line in enumerate(lines):
        colour = theme.colours[2] if line.arm.leaks else theme.colours[1]
        ends = [line.whole.mean, line.prefix.mean]
        axes.plot(ends, [place, place], color=colour, linewidth=2.5, alpha=0.6, zorder=2)
        axes.plot(ends[0], place, "o", color=theme.paper, mec=colour, mew=1.8, markersize=8, zorder=3)
        axes.plot(ends[1], place, "o", color=colour, markersize=5, zorder=4)
        if line.arm.leaks:
            axes.annotate(
                f"gap {short(line.gap.mean)}", (float(np.mean(ends)), place), xytext=(0, 8),
                textcoords="offset points", ha="center", color=theme.ink, fontsize=10,
            )  # fmt: skip
    axes.set_yticks(range(len(lines)), [line.arm.name for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("nats a token, lower is better\nhollow: whole block, filled: prefix alone")
    axes.margins(x=0.08)
    axes.locator_params(axis="x", nbins=6)
    return figure
