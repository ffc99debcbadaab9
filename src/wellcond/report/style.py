"""The look of the figures: one colour per arm, told apart without seeing colour, on light and on dark."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of a figure's paper, text and grid, and of the arms (the first is the baseline's)."""

    paper: str
    ink: str
    faint: str
    grid: str
    colours: tuple[str, ...]


# Okabe and Ito's palette after a neutral grey for the baseline: without its yellow (invisible on white), its
# lightest colours darkened to 3:1 against the paper, as WCAG asks of graphics.
LIGHT = Theme(
    paper="#ffffff",
    ink="#1d2430",
    faint="#5b6472",
    grid="#e4e7ec",
    colours=("#5b6472", "#0072b2", "#d55e00", "#009e73", "#b4568f", "#b87a00", "#2f8fc8"),
)
DARK = Theme(
    paper="#171b22",
    ink="#e6e9ee",
    faint="#a2abb9",
    grid="#2c333e",
    colours=("#a2abb9", "#4aa8e8", "#f08a4b", "#2cc295", "#dd8fc0", "#e6b13c", "#8fd0f5"),
)
DASHES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (6, 1.3)),
    (0, (1.3, 1.1)),
    (0, (6, 1.3, 1.3, 1.3)),
    (0, (3, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclasses.dataclass(frozen=True)
class Mark:
    """How one arm is drawn in every figure: colour, marker and dashes."""

    colour: str
    marker: str
    dashes: tuple[int, tuple[float, ...]]


def marks(arms: Sequence[str], baseline: str, theme: Theme = LIGHT) -> dict[str, Mark]:
    """A mark per arm; the baseline is grey, the others follow in their order, whatever else is drawn.

    Dashes differ from one arm to the next, so that lines on top of each other are seen to be several.

    >>> marks(["a", "baseline"], "baseline")["baseline"].colour == LIGHT.colours[0]
    True
    """
    others = [arm for arm in arms if arm != baseline]
    count = len(theme.colours) - 1
    found = {baseline: Mark(theme.colours[0], MARKERS[0], DASHES[0])}
    for i, arm in enumerate(others):
        found[arm] = Mark(
            theme.colours[1 + i % count], MARKERS[(1 + i) % len(MARKERS)], DASHES[(1 + i) % len(DASHES)]
        )
    return {arm: found[arm] for arm in arms}


def panel(title: str, theme: Theme, *, height: float = 3.1, width: float = 4.0) -> tuple[Figure, Axes]:
    """An empty figure (inches) with one axes in the house style. No pyplot: nothing global is touched."""
    figure = Figure(figsize=(width, height), dpi=200, layout="constrained", facecolor=theme.paper)
    axes = figure.add_subplot()
    axes.set_facecolor(theme.paper)
    axes.set_title(title, loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(colors=theme.faint, labelcolor=theme.ink, labelsize=9.5, which="both")
    axes.tick_params(which="minor", length=0)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme.faint)
        label.set_fontsize(9.5)
    return figure, axes


def legend(figure: Figure, axes: Axes, theme: Theme) -> None:
    """The legend below the axes, where it never covers data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 2 if sum(map(len, labels)) > 32 or len(labels) == 4 else 3
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=min(columns, len(labels)),
            frameon=False,
            fontsize=9.5,
            labelcolor=theme.ink,
            handlelength=2.2,
            columnspacing=1.4,
        )


def plain_log_ticks(axes: Axes, axis: str) -> None:
    """Ticks of a log axis as 1, 10, 100, 10⁴: read at a glance."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    the_axis = axes.xaxis if axis == "x" else axes.yaxis
    low, high = sorted(the_axis.get_view_interval())
    narrow = low > 0 and math.log10(high / low) < 2.2
    the_axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=7))
    the_axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    the_axis.set_minor_formatter(NullFormatter())


def short(value: float | None) -> str:
    """A positive number in three significant digits, powers of ten from 10⁴ on.

    >>> short(1.9804), short(87.31), short(1234.0), short(3.21e6), short(1e5), short(float("inf"))
    ('1.98', '87.3', '1,234', '3.2×10⁶', '10⁵', '∞')
    """
    if value is None or math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.1e}".split("e")
        power = "10" + str(int(exponent)).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
        mantissa = mantissa.removesuffix(".0").replace("-", "−")
        return power if mantissa == "1" else f"{mantissa}×{power}"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()


def file_names(names: Iterable[str]) -> dict[str, str]:
    """A distinct file name of ``[\\w.=-]`` only for each name, so that no name makes a folder.

    >>> file_names(["spectrum a/b", "spectrum a:b"])
    {'spectrum a/b': 'spectrum-a-b', 'spectrum a:b': 'spectrum-a-b-2'}
    """
    found: dict[str, str] = {}
    for name in names:
        stem = candidate = re.sub(r"[^\w.=-]+", "-", name, flags=re.ASCII).strip("-.") or "plot"
        number = 1
        # Compared without case: two such files would be one on many file systems.
        while candidate.casefold() in {other.casefold() for other in found.values()}:
            number += 1
            candidate = f"{stem}-{number}"
        found[name] = candidate
    return found
