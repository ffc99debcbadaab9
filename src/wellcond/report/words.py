"""The verdicts and the cells of the table, in words and digits; never stronger than the interval."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from wellcond.report.compared import difference_unit
from wellcond.report.folder import Arm, Difference, Line, RunFolder
from wellcond.report.kappas import QUANTITIES, Panel
from wellcond.report.pairs import Pair, pairs
from wellcond.report.prefix import prefix_lines
from wellcond.report.style import short
from wellcond.statistics import Estimate

NO_INTERVAL = "one seed: no interval"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One sentence about one arm: its head in bold, what it rests on, and ``tone`` better, worse or open."""

    arm: str
    head: str
    detail: str
    tone: str


def verdicts(run: RunFolder) -> list[Verdict]:
    """A verdict for every arm that was compared, read from its interval.

    Raises:
        ValueError: the summary claims "better" or "worse" where its own interval does not show it.
    """
    digits = decimals(run.table.values())
    against = pairs(run)
    return [
        _verdict(run, arm, run.table[arm.name], digits, against)
        for arm in run.arms
        if arm.name in run.table and arm.name != run.baseline.name
    ]


def _verdict(run: RunFolder, arm: Arm, line: Line, digits: int, against: list[Pair]) -> Verdict:
    name = arm.name + (" (leaks the future)" if arm.leaks else "")
    difference, base, metric = line.difference, run.baseline.name, run.metric.name
    tone = shown(difference, run.metric.higher_is_better)
    claim = next((word for word in ("better", "worse") if (line.verdict or "").startswith(word)), None)
    if claim is not None and claim != tone:
        raise ValueError(
            f"{run.path / 'summary.json'}, arm {arm.name!r}: the verdict {line.verdict!r} is stronger than its "
            f"interval {difference}, which shows {tone!r}"
        )
    if difference is None:
        return Verdict(
            arm.name, f"{name} could not be compared to {base}:", "they share no finished seed.", "open"
        )
    size = f"{signed(difference.mean, digits)} {difference_unit(run.metric)}".strip()
    if not _interval(difference.low, difference.high):
        return Verdict(
            arm.name, f"{name} against {base}: no verdict.",
            f"One seed gives no interval. {metric.capitalize()} differs by {size}, which may be chance.", "open",
        )  # fmt: skip
    heads = {
        "better": f"{name} is better than {base}.",
        "worse": f"{name} is worse than {base}.",
        "open": f"{name}: no difference to {base} shown at 95 %.",
    }
    if arm.leaks and (line_alone := _prefix_difference(run, arm)) is not None:
        return _verdict_alone(arm.name, name, base, f"{metric.capitalize()} {size}", line_alone, digits)
    detail = (
        f"{metric.capitalize()} {size}, 95 % interval {signed(difference.low, digits)} to "
        f"{signed(difference.high, digits)}, {difference.n or line.n} paired seeds"
    )
    if difference.effect is not None and not math.isnan(difference.effect):
        detail += f", effect size {signed(difference.effect, 1)}"
    detail += "."
    if tone == "better":
        detail += _what_others_reach(run, arm, digits, against)
    return Verdict(arm.name, heads[tone], detail, tone)


def _prefix_difference(run: RunFolder, arm: Arm) -> Estimate | None:
    """Prefix-only loss minus the baseline's, where there is an interval."""
    found = next((line.difference for line in prefix_lines(run) if line.arm == arm), None)
    return None if found is None or found.low is None else found


def _verdict_alone(arm: str, name: str, base: str, whole: str, alone: Estimate, digits: int) -> Verdict:
    """The verdict of an arm that leaks: from its prefix-only loss, since the other is not that of a causal model."""
    tone = shown(Difference(alone.mean, alone.low, alone.high), higher_is_better=False)
    heads = {
        "better": f"{name} is better than {base} when it is scored from prefixes alone.",
        "worse": f"{name} is worse than {base} when it is scored from prefixes alone.",
        "open": f"{name}: no difference to {base} shown at 95 % when it is scored from prefixes alone.",
    }
    interval = _range(alone.low, alone.high, lambda value: signed(value, digits))
    detail = (
        f"Prefix-only loss {signed(alone.mean, digits)} nats, 95 % interval {interval}, {alone.n} paired seeds. "
        f"{whole} with later tokens in view says nothing."
    )
    return Verdict(arm, heads[tone], detail, tone)


@dataclasses.dataclass(frozen=True)
class PrefixCells:
    """One line of the table of prefix-only losses, ready to print."""

    arm: Arm
    whole: str
    prefix: str
    gap: str
    gap_interval: str
    difference: str
    interval: str


def prefix_cells(run: RunFolder) -> list[PrefixCells]:
    """Whole and prefix-only loss of every arm; empty where no run was scored from prefixes."""

    def plus(value: float | None) -> str:
        return signed(value, 3)

    return [
        PrefixCells(
            line.arm,
            plain(line.whole.mean, 3),
            plain(line.prefix.mean, 3),
            plus(line.gap.mean),
            _range(line.gap.low, line.gap.high, plus),
            "" if line.difference is None else plus(line.difference.mean),
            "" if line.difference is None else _range(line.difference.low, line.difference.high, plus),
        )
        for line in prefix_lines(run)
    ]


def _what_others_reach(run: RunFolder, arm: Arm, digits: int, against: list[Pair]) -> str:
    """Which arms do as well, and what a control that does as well or better says about a gain."""
    said, alike = "", []
    for other in run.arms:
        difference = _difference(other.name, arm.name, against)
        if difference is None:
            continue
        tone = shown(difference, run.metric.higher_is_better)
        explains = other.control and not arm.control
        if explains and tone == "better":
            interval = _range(difference.low, difference.high, lambda value: signed(value, digits))
            said += (
                f" The control {other.name} is better than it, {signed(difference.mean, digits)} ({interval}): "
                f"this gain can be had without conditioning."
            )
        elif explains and tone == "open":
            said += (
                f" No difference is shown between it and the control {other.name}: this gain is not shown to come "
                f"from conditioning."
            )
        elif tone == "open":
            alike.append(other.name)
    if alike:
        said += f" No difference is shown between it and {', '.join(alike)}."
    return said


def _difference(first: str, second: str, against: list[Pair]) -> Difference | None:
    """``first`` minus ``second``; None if they were not compared."""
    for pair in against:
        if (pair.first, pair.second) == (first, second):
            return pair.difference
        if (pair.first, pair.second) == (second, first):
            turned = pair.difference
            return dataclasses.replace(
                turned,
                mean=-turned.mean,
                low=None if turned.high is None else -turned.high,
                high=None if turned.low is None else -turned.low,
                effect=None if turned.effect is None else -turned.effect,
            )
    return None


@dataclasses.dataclass(frozen=True)
class PairCells:
    """One line of the table of arms against each other, ready to print."""

    name: str
    seeds: int
    difference: str
    interval: str
    words: str
    tone: str


def pair_cells(run: RunFolder) -> list[PairCells]:
    """Every two arms besides the baseline."""
    digits = decimals(run.table.values())
    found = []
    for pair in pairs(run):
        tone = shown(pair.difference, run.metric.higher_is_better)
        words = {
            "better": f"{pair.first} is better",
            "worse": f"{pair.second} is better",
            "open": "no difference shown",
        }
        difference = pair.difference
        interval = _range(difference.low, difference.high, lambda value: signed(value, digits))
        name = f"{pair.first} against {pair.second}"
        found.append(
            PairCells(name, pair.seeds, signed(difference.mean, digits), interval, words[tone], tone)
        )
    return found


def shown(difference: Difference | None, higher_is_better: bool) -> str:
    """What an interval shows: ``better``, ``worse``, or ``open`` when it holds zero or does not exist.

    >>> shown(Difference(2.0, 1.0, 3.0), True), shown(Difference(2.0, -1.0, 5.0), True), shown(Difference(2.0), True)
    ('better', 'open', 'open')
    """
    if difference is None or not _interval(difference.low, difference.high):
        return "open"
    low, high = difference.low or 0.0, difference.high or 0.0
    if low <= 0 <= high:
        return "open"
    return "better" if (low > 0) == higher_is_better else "worse"


@dataclasses.dataclass(frozen=True)
class Cells:
    """One arm's line of the table, ready to print."""

    arm: Arm
    seeds: int
    mean: str
    interval: str
    difference: str
    difference_interval: str
    effect: str
    tone: str
    kappa: Mapping[str, str]
    time: str
    memory: str


def cells(run: RunFolder, measured: Sequence[Panel] = ()) -> list[Cells]:
    """The lines of the table, in the order of the arms.

    κ is that of the panels, in their symbol, so that table and bars say the same; the summary's without rows.
    """
    kappas: dict[str, dict[str, float]] = {arm: dict(line.kappa) for arm, line in run.table.items()}
    for panel in measured:
        for arm, seeds in panel.averages().items():
            kappas.setdefault(arm, {})[panel.quantity] = float(seeds.mean())
    digits = decimals(run.table.values())
    return [
        _cells(run, arm, run.table[arm.name], kappas[arm.name], digits)
        for arm in run.arms
        if arm.name in run.table
    ]


def _cells(run: RunFolder, arm: Arm, line: Line, kappas: Mapping[str, float], digits: int) -> Cells:
    difference = line.difference
    memory = [r.peak_memory_mb for r in run.results_of(arm.name).values() if r.peak_memory_mb is not None]
    return Cells(
        arm=arm,
        seeds=line.n,
        mean=plain(line.mean, digits),
        interval=_range(line.low, line.high, lambda value: plain(value, digits)),
        difference="" if difference is None else signed(difference.mean, digits),
        difference_interval=""
        if difference is None
        else _range(difference.low, difference.high, lambda value: signed(value, digits)),
        effect="" if difference is None or difference.effect is None else signed(difference.effect, 1),
        tone=shown(difference, run.metric.higher_is_better),
        kappa={name: short(kappas.get(name)) for name in QUANTITIES},
        time="" if line.relative_step_time is None else f"{line.relative_step_time:.2f}×",
        memory=f"{statistics.fmean(memory):,.0f} MB" if memory else "",
    )


def decimals(lines: Iterable[Line]) -> int:
    """Decimals for the metric, at least one: two significant digits of a typical interval's half width.

    >>> decimals([Line(3, 97.3, 96.9, 97.7)]), decimals([Line(1, 2.45)]), decimals([Line(1, 97.3)])
    (2, 3, 2)
    """
    lines = list(lines)
    widths = [
        (line.high - line.low) / 2
        for line in lines
        if line.low is not None and line.high is not None and 0 < line.high - line.low < math.inf
    ]
    if widths:
        return min(6, max(1, 1 - math.floor(math.log10(statistics.median(widths)))))
    sizes = [abs(line.mean) for line in lines if line.mean != 0 and math.isfinite(line.mean)]
    return min(6, max(0, 3 - math.floor(math.log10(max(sizes))))) if sizes else 2


def plain(value: float | None, digits: int) -> str:
    """A number with a fixed count of decimals and a real minus sign."""
    if value is None or not math.isfinite(value):
        return short(value)
    return f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int) -> str:
    """The same with its sign, so that a difference is seen to be one.

    >>> signed(1.234, 1), signed(-0.5, 2)
    ('+1.2', '−0.50')
    """
    if value is None or not math.isfinite(value):
        return short(value)
    return f"{value:+.{digits}f}".replace("-", "−")


def _interval(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and not math.isnan(low) and not math.isnan(high)


def _range(low: float | None, high: float | None, write: Callable[[float | None], str]) -> str:
    if not _interval(low, high):
        return NO_INTERVAL
    return f"{write(low)} to {write(high)}"
