"""Plots and one self-contained HTML page, from the folder that a run writes."""

from wellcond.report.compared import bars_figure, curves_figure
from wellcond.report.folder import RunFolder, read_run
from wellcond.report.measured import layers_figure, spectrum_figure
from wellcond.report.page import write_report
from wellcond.report.style import DARK, LIGHT, Theme

__all__ = [
    "DARK",
    "LIGHT",
    "RunFolder",
    "Theme",
    "bars_figure",
    "curves_figure",
    "layers_figure",
    "read_run",
    "spectrum_figure",
    "write_report",
]
