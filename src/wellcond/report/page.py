"""write_report: one self-contained page and its plots, from a run folder."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from wellcond.report.compared import difference_unit
from wellcond.report.detections import detection_plots
from wellcond.report.folder import RunFolder, read_run
from wellcond.report.kappas import QUANTITIES, Panel, panels
from wellcond.report.plots import (
    Plot,
    bar_plots,
    curve_plots,
    kappa_plots,
    prefix_plots,
    result_plots,
    spectrum_plots,
)
from wellcond.report.style import DARK, LIGHT, file_names, marks, png
from wellcond.report.words import cells, pair_cells, prefix_cells, verdicts


@dataclasses.dataclass(frozen=True)
class Picture:
    """A plot as the page embeds it: data URIs for light and for dark."""

    caption: str
    alt: str
    light: str
    dark: str
    width: int
    height: int


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read what follows, and pictures, or why there are none."""

    id: str
    title: str
    text: str
    pictures: list[Picture]


def write_report(folder: str | Path) -> Path:
    """Write ``plots/*.png`` and ``report.html`` into a run folder.

    The page needs no network, no script and no other file. It is light or dark as its reader's system is;
    the PNG files are light.

    Args:
        folder: what `wellcond demo` and `wellcond compare` write: ``run.json``, ``results.jsonl`` and
            ``summary.json``; without ``rows.jsonl`` or ``spectra.json`` the page says that they are missing.

    Returns:
        The path of ``report.html``.

    Raises:
        FileNotFoundError: the folder or a necessary file is missing.
        ValueError: a file is corrupt, empty or contradicts another; the message names file and line.

    >>> write_report("no/such/run")
    Traceback (most recent call last):
    FileNotFoundError: no/such/run is not a folder; `wellcond demo` and `wellcond compare` write run folders
    """
    import jinja2

    run = read_run(folder)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("wellcond.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = [arm.name for arm in run.arms]
    measured = panels(run.rows, names) if run.rows else []
    context = {
        "run": run,
        "verdicts": verdicts(run),
        "cells": cells(run, measured),
        "pairs": pair_cells(run),
        "prefixes": prefix_cells(run),
        "quantities": QUANTITIES,
        "symbols": dict.fromkeys(QUANTITIES, "κ") | {data.quantity: data.symbol for data in measured},
        "difference_unit": difference_unit(run.metric),
        "leaking": [arm.name for arm in run.arms if arm.leaks],
        "light": marks(names, run.baseline.name, LIGHT),
        "dark": marks(names, run.baseline.name, DARK),
        "config": list(flatten(run.config)),
        "versions": list(flatten(run.versions)),
        "machine": list(flatten(run.machine)) if isinstance(run.machine, Mapping) else run.machine,
        "single_seed": all(line.n == 1 for line in run.table.values()),
        "unfinished": unfinished(run),
        "sections": sections(run, measured),
    }
    page = environment.get_template("report.html.jinja").render(context)
    target = run.path / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


def sections(run: RunFolder, measured: list[Panel]) -> list[Section]:
    """Draws everything: files into ``plots/``, and the pictures of each section."""
    why = (
        "This run folder has no rows.jsonl: κ was not measured during training."
        if run.rows is None
        else "rows.jsonl has no measurement of tokens or attention."
    )
    mean = (
        "κ = σ₁/σₙ; lower is better conditioned, 1 is perfect. Means over the samples of the measured batch"
    )
    parts: list[tuple[str, str, str, Iterable[Plot]]] = [
        ("result", "Result", "", [*result_plots(run), *prefix_plots(run)]),
        ("curves", "Learning curves", "The results hold no learning curve.", curve_plots(run)),
        ("kappa", "κ over training", why, kappa_plots(run, measured)),
        ("bars", "κ averaged over training", why, bar_plots(run, measured)),
        (
            "spectra",
            "Singular values before and after",
            "This run folder has no spectra.json: no spectrum was saved.",
            spectrum_plots(run),
        ),
    ]
    if found := list(detection_plots(run)):
        parts.insert(1, ("detections", "What is found", "", found))
    texts = {
        "kappa": f"{mean} and, for attention, over heads (and layers). Attention means what each head returns, "
        "softmax(QKᵀ/√d)V or its counterpart.",
        "bars": "The three groups of bars of the paper's Figures 2, 3 and 4. All three figures share one axis.",
        "detections": "The first test images, in each arm with the first seed that was trained.",
        "spectra": "One real sample at the place where the correction is added. All figures share one axis.",
    }
    drawn = {id: list(plots) for id, _, _, plots in parts}
    files = file_names(plot.name for plots in drawn.values() for plot in plots)
    folder = run.path / "plots"
    folder.mkdir(exist_ok=True)
    return [
        Section(
            id,
            title,
            texts.get(id, "") if drawn[id] else absent,
            [picture(plot, folder / f"{files[plot.name]}.png") for plot in drawn[id]],
        )
        for id, title, absent, _ in parts
    ]


def picture(plot: Plot, path: Path) -> Picture:
    """Draw a plot on both themes; the light one is also written to ``path``."""
    figure = plot.draw(LIGHT)
    light, dark = png(figure), png(plot.draw(DARK))
    path.write_bytes(light)
    width, height = figure.get_size_inches() * 100
    return Picture(plot.caption, plot.alt, _uri(light), _uri(dark), round(width), round(height))


def _uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def unfinished(run: RunFolder) -> list[str]:
    """The runs that were planned and have no result: said on the page, not passed over."""
    return [
        f"{arm.name}, seed {seed}"
        for arm in run.arms
        for seed in run.seeds
        if seed not in run.results_of(arm.name)
    ]


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested configuration as dotted names and printed values.

    >>> list(flatten({"optimizer": {"lr": 0.001}, "seeds": [0, 1], "ema": None}))
    [('optimizer.lr', '0.001'), ('seeds', '0, 1'), ('ema', 'none')]
    """
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from flatten(item, f"{name}.")
        elif isinstance(item, (list, tuple)):
            yield name, ", ".join(map(str, item)) or "none"
        else:
            yield name, "none" if item is None or item == {} else str(item)
