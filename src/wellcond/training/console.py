"""What a person sees of a comparison: a bar on a terminal, plain lines in a pipe, one table at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from wellcond.statistics import Estimate
from wellcond.training.compare import ArmSummary
from wellcond.training.engine import Progress as Steps
from wellcond.training.engine import Score
from wellcond.training.run import RunResult

PIPE_WIDTH = 120
"""Columns where there is no terminal whose width could be asked for."""


def make_console(*, quiet: bool = False) -> Console:
    """Standard output; no colours and no carriage returns where it is not a terminal; ``quiet``: nothing at all."""
    console = Console(highlight=False, quiet=quiet)
    if console.is_terminal:
        return console
    return Console(highlight=False, quiet=quiet, width=PIPE_WIDTH, no_color=True)


class Narrator:
    """Tells how far a comparison is: ``announce`` after every step, ``finished`` after every run."""

    def __init__(self, console: Console, runs: int, bar: Progress | None) -> None:
        self.console = console
        self.runs = runs
        self.done = 0
        self.bar = bar
        self.task = bar.add_task("", total=float(runs)) if bar is not None else None

    def announce(self, run: str, step: int, steps: int) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(
                self.task,
                completed=self.done + step / steps,
                description=f"{run}, step {step}/{steps}",
            )

    def finished(self, result: RunResult) -> None:
        self.done += 1
        metric = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        self.console.print(f"run {self.done}/{self.runs}: {result.arm}, seed {result.seed}: {metric}")


@contextlib.contextmanager
def narrated(console: Console, runs: int) -> Iterator[Narrator]:
    """A `Narrator` with a progress bar while the block runs, if the console is a terminal."""
    if not console.is_terminal:
        yield Narrator(console, runs, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield Narrator(console, runs, bar)


@contextlib.contextmanager
def told(console: Console, name: str) -> Iterator[tuple[Steps, Score]]:
    """What to call after every step and at every point of the learning curve of one run."""
    steps_in_all = 0

    def score(point: dict[str, float]) -> None:
        values = ", ".join(f"{key} {value:.4g}" for key, value in point.items() if key != "step")
        console.print(f"step {int(point['step'])}/{steps_in_all}: {values}")

    with narrated(console, 1) as narrator:

        def progress(step: int, steps: int) -> None:
            nonlocal steps_in_all
            steps_in_all = steps
            narrator.announce(name, step, steps)

        yield progress, score


def results_table(table: Sequence[ArmSummary], *, metric: str, unit: str) -> Table:
    """Per arm: mean and paired difference with 95 % intervals, and the verdict; 80 columns are enough."""
    title = (
        f"{metric} in {unit}, ± 95 % interval over seeds" if unit else f"{metric}, ± 95 % interval over seeds"
    )
    out = Table("arm", metric, "to baseline", "verdict", title=title, title_justify="left")
    for line in table:
        difference = with_interval(line.difference, sign="+") if line.difference is not None else ""
        out.add_row(
            _named(line), with_interval(line.metric), difference, line.verdict.removesuffix(" at 95 %")
        )
    return out


def measurements_table(table: Sequence[ArmSummary]) -> Table:
    """Per arm: κ at the start and the end of training, and the time of a step beside the baseline's."""
    out = Table("arm", "κ tokens", "κ attention", "time/step", title="measured", title_justify="left")
    for line in table:
        kappas = [
            f"{short(line.kappa_start.get(name))} → {short(line.kappa_end.get(name))}"
            for name in ("tokens", "all_layers")
        ]
        time = f"×{line.relative_step_time:.2f}" if line.relative_step_time is not None else ""
        out.add_row(_named(line), *kappas, time)
    return out


def _named(line: ArmSummary) -> str:
    return f"{line.arm.name} (leaks the future)" if line.arm.leaks else line.arm.name


def with_interval(value: Estimate, *, sign: str = "") -> str:
    """
    >>> with_interval(Estimate(3, 97.31, 96.21, 98.41)), with_interval(Estimate(1, 0.5, None, None), sign="+")
    ('97.31 ± 1.10', '+0.50 ± ?')
    """
    half = "?" if value.high is None else f"{value.high - value.mean:.2f}"
    return f"{value.mean:{sign}.2f} ± {half}"


def short(value: float | None) -> str:
    """
    >>> short(1.9984), short(166905.3), short(None)
    ('2.0', '1.7e+05', '')
    """
    if value is None:
        return ""
    return f"{value:.1f}" if value < 1000 else f"{value:.1e}"
