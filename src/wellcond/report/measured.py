"""Figures of one measurement: singular values, and κ layer by layer. For `inspect --plot` and the docs too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wellcond.monitor.rows import Row
from wellcond.report.style import LIGHT, Theme, legend, panel, plain_log_ticks, short


def spectrum_figure(
    before: Any,
    after: Any | None = None,
    *,
    title: str = "Singular values of the tokens",
    colour: str | None = None,
    limits: tuple[float, float] | None = None,
    theme: Theme = LIGHT,
) -> Figure:
    """Singular values before and after the correction, largest first, on a log axis.

    Args:
        before: ``(r,)`` sequence or tensor of singular values, in any order.
        after: the same after the correction; None draws one line.
        title: above the axes.
        colour: of the line after; by default the first after the baseline's.
        limits: of the vertical axis, to compare figures; by default the data's.
        theme: `LIGHT` or `DARK`.

    Returns:
        A matplotlib figure; the legend has σ₁/σₙ of each line. Zeros have no place on a log axis: the
        figure says how many there are.

    Raises:
        ValueError: no values, negative ones, or not one-dimensional.

    >>> figure = spectrum_figure([10.0, 1.0, 0.1], [20.0, 11.0, 10.1])
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['before, σ₁/σₙ = 100', 'after, σ₁/σₙ = 1.98']
    """
    figure, axes = panel(title, theme)
    axes.set_yscale("log")
    lines = [("before", before, theme.colours[0], "--")]
    if after is not None:
        lines.append(("after", after, colour or theme.colours[1], "-"))
    zeros = []
    for name, given, ink, dashes in lines:
        values = _singular_values(given, name)
        ratio = values[0] / values[-1] if values[-1] > 0 else float("inf")
        if count := int((values == 0).sum()):
            zeros.append(f"{count} of {len(values)} {name} are 0")
        index = np.arange(1, len(values) + 1)
        drawn = np.where(values > 0, values, np.nan)
        dots = "o" if len(values) <= 32 else ""
        axes.plot(
            index, drawn, dashes, color=ink, linewidth=2, marker=dots, markersize=3.5,
            label=f"{name}, σ₁/σₙ = {short(ratio)}",
        )  # fmt: skip
    axes.set_xlabel("index i")
    axes.set_ylabel("σᵢ", rotation=0, labelpad=8, fontsize=11.5, ha="right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    if limits is not None:
        axes.set_ylim(*limits)
    if zeros:
        axes.text(
            0.03, 0.05, "; ".join(zeros), transform=axes.transAxes, color=theme.ink, fontsize=9.5,
            bbox={"facecolor": theme.paper, "edgecolor": theme.grid},
        )  # fmt: skip
    plain_log_ticks(axes, "y")
    legend(figure, axes, theme)
    return figure


def _singular_values(given: Any, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"singular values {name}: shape (r,) with r ≥ 1 is expected, not {values.shape}")
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"singular values {name} must be finite and ≥ 0, not {values.tolist()[:8]}")
    return np.sort(values)[::-1]


SITES = {"attention.output": "head outputs softmax(QKᵀ/√d)V", "attention.weights": "softmax matrices"}


def layers_figure(rows: Sequence[Row], *, title: str = "κ, layer by layer", theme: Theme = LIGHT) -> Figure:
    """κ of the tokens and of every self-attention layer, as `wellcond.measure` returns them.

    Each line is the mean over a layer's heads, its band from the smallest head to the largest. Where κ is
    infinite in one layer, the whole line shows κ⁺ and its label says so.

    Args:
        rows: rows of one measurement.
        title: above the axes.
        theme: `LIGHT` or `DARK`.

    Raises:
        ValueError: no rows, or rows of several steps.

    >>> rows = [Row(0, "tokens", None, None, 80.0, 80.0, 16, 8.0, 0.1, "blocks.0", 4),
    ...         Row(0, "attention.output", 0, 0, 30.0, 30.0, 8, 3.0, 0.1, "blocks.0.attn", 4)]
    >>> [text.get_text() for text in layers_figure(rows).axes[0].get_xticklabels()]
    ['tokens', '1']
    """
    if not rows:
        raise ValueError("no rows to draw; wellcond.measure(model, batch) returns them")
    if len(steps := sorted({row.step for row in rows})) > 1:
        raise ValueError(f"rows of one step are expected, not of steps {steps}")
    figure, axes = panel(title, theme, width=5.6, height=3.6)
    axes.set_yscale("log")
    layers = sorted({row.layer for row in rows if row.layer is not None})
    for site, ink, marker in zip(SITES, theme.colours[1:], "os", strict=False):
        chosen = [row for row in rows if row.site == site]
        if chosen:
            name, symbol = SITES[site], "κ⁺" if any(np.isinf(row.kappa) for row in chosen) else "κ"
            heads = [[_value(row, symbol) for row in chosen if row.layer == layer] for layer in layers]
            mean = [float(np.mean(values)) if values else np.nan for values in heads]
            low = [min(values, default=np.nan) for values in heads]
            high = [max(values, default=np.nan) for values in heads]
            place = [layer + 1 for layer in layers]
            axes.fill_between(place, low, high, color=ink, alpha=0.18, linewidth=0)
            axes.plot(
                place,
                mean,
                color=ink,
                linewidth=2,
                marker=marker,
                markersize=4.5,
                label=f"{symbol} of {name}",
            )
    _token_points(axes, rows, theme)
    ticks = layers if len(layers) <= 13 else layers[:: -(-len(layers) // 12)]
    axes.set_xticks([0, *(layer + 1 for layer in ticks)], ["tokens", *(str(layer + 1) for layer in ticks)])
    axes.set_xlabel("self-attention layer")
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, 0.9), max(top, 10.0))
    plain_log_ticks(axes, "y")
    legend(figure, axes, theme)
    return figure


def _token_points(axes: Any, rows: Sequence[Row], theme: Theme) -> None:
    tokens = {row.site: row for row in rows if row.layer is None}
    before = tokens.get("conditioned.before")
    shown = {"tokens": tokens.get("tokens")} if before is None else {
        "tokens before": before, "tokens after": tokens.get("conditioned.after")
    }  # fmt: skip
    for (name, row), face in zip(shown.items(), (theme.paper, theme.ink), strict=False):
        if row is not None:
            symbol = "κ⁺" if np.isinf(row.kappa) else "κ"
            axes.plot(
                0, _value(row, symbol), "D", color=theme.ink, markersize=6.5, linestyle="none",
                markerfacecolor=theme.ink if len(shown) == 1 else face,
                label=f"{symbol} of the {name}: {short(_value(row, symbol))}",
            )  # fmt: skip


def _value(row: Row, symbol: str) -> float:
    return row.kappa if symbol == "κ" else row.kappa_pinv
