"""GLUE's table in the paper's order: scores, averages, and differences to the baseline with intervals over seeds.

The paper's average is not the mean of the seven columns it shows (77.5 and 78.7 for its 78.6 and 79.7). It fits a mean
of eight with an STS-B of 86.3 and 86.8, which is not shown, or one of nine with the mismatched MNLI. So three averages
are given here, and each says of what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from wellcond.monitor.sinks import read_lines
from wellcond.statistics import CONFIDENCE, Estimate, estimate, paired_difference

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("MNLI", "mnli", "accuracy_matched"),
    ("SST-2", "sst2", "accuracy"),
    ("RTE", "rte", "accuracy"),
    ("QNLI", "qnli", "accuracy"),
    ("QQP", "qqp", "f1"),
    ("MRPC", "mrpc", "f1"),
    ("CoLA", "cola", "matthews"),
    ("MNLI-mm", "mnli", "accuracy_mismatched"),
    ("STS-B", "stsb", "spearman"),
)
"""Heading, task and score of each column; the first seven are the paper's, in its order.

Which score the paper shows for QQP and MRPC is not said; F1 is what BERT and Cramming show.
"""

BASELINE = "baseline"

AVERAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("avg of 7", tuple(name for name, _, _ in COLUMNS[:7])),
    ("avg of 8", (*(name for name, _, _ in COLUMNS[:7]), "STS-B")),
    ("avg of 9", tuple(name for name, _, _ in COLUMNS)),
)

PAPER = {
    "baseline": (83.8, 92.3, 55.1, 90.1, 87.3, 85.0, 48.9),
    "conditioned": (84.2, 92.5, 55.6, 91.1, 87.4, 86.3, 53.7),
}
"""What the paper reports for Crammed BERT, in the order of the first seven columns."""


@dataclasses.dataclass(frozen=True)
class GlueRow:
    """One arm.

    Attributes:
        arm: its name.
        scores: for each column and average the mean over seeds with its interval; only those that have a seed.
        differences: the same of the paired differences to the baseline; empty for the baseline.
    """

    arm: str
    scores: Mapping[str, Estimate]
    differences: Mapping[str, Estimate]


@dataclasses.dataclass(frozen=True)
class GlueTable:
    """All arms, and the tasks of which there is no result."""

    rows: Sequence[GlueRow]
    missing: tuple[str, ...]


def read_glue_table(runs: Path) -> GlueTable:
    """The table of the results in ``RUNS/glue-TASK/results.jsonl``, one folder for each of the eight tasks.

    An average counts a seed only if that seed has all of its columns.

    Raises:
        FileNotFoundError: no task has results.
        ValueError: a result lacks its task's score.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    missing = []
    for task in dict.fromkeys(task for _, task, _ in COLUMNS):
        path = runs / f"glue-{task}" / "results.jsonl"
        if not path.is_file():
            missing.append(task)
            continue
        for line in read_lines(path):
            for name, of, score in COLUMNS:
                if of != task:
                    continue
                if score not in line["metrics"]:
                    raise ValueError(
                        f"{path}: a result of {line['arm']}, seed {line['seed']}, has no {score}"
                    )
                by_seed = values.setdefault(line["arm"], {}).setdefault(name, {})
                by_seed[line["seed"]] = float(line["metrics"][score])
    if not values:
        raise FileNotFoundError(
            f"{runs} holds no glue-TASK/results.jsonl; `wellcond compare glue-rte --out {runs}/glue-rte ...` makes one"
        )
    for columns in values.values():
        for name, parts in AVERAGES:
            seeds = set.intersection(*(set(columns.get(part, {})) for part in parts))
            columns[name] = {seed: sum(columns[part][seed] for part in parts) / len(parts) for seed in seeds}
    arms = sorted(values, key=lambda arm: (arm != BASELINE, list(values).index(arm)))
    return GlueTable([_row(arm, values) for arm in arms], tuple(missing))


def _row(arm: str, values: Mapping[str, Mapping[str, dict[int, float]]]) -> GlueRow:
    scores = {name: estimate(list(seeds.values())) for name, seeds in values[arm].items() if seeds}
    differences = {}
    if arm != BASELINE and BASELINE in values:
        for name in scores:
            found = paired_difference(values[arm][name], values[BASELINE].get(name, {}))
            if found is not None:
                differences[name] = found
    return GlueRow(arm, scores, differences)


def glue_markdown(table: GlueTable) -> str:
    """The table in Markdown: a line of scores for each arm, and under it its differences to the baseline."""
    names = [name for name, _, _ in COLUMNS[:7]] + ["avg of 7", "MNLI-mm", "STS-B", "avg of 8", "avg of 9"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in table.rows:
        lines.append(_line(row.arm, [_score(row.scores.get(name)) for name in names]))
        if row.differences:
            cells = [_difference(row.differences.get(name)) for name in names]
            lines.append(_line(f"{row.arm} − {BASELINE}", cells))
    for arm, reported in PAPER.items():
        seven = [f"{value:.1f}" for value in reported]
        rest = [f"{sum(reported) / 7:.1f}", *["–"] * 4]
        lines.append(_line(f"{arm}, the paper's", [*seven, *rest]))
    notes = [
        "",
        f"± is half of a {CONFIDENCE:.0%} t interval over seeds; differences are paired by seed. "
        "MNLI is the matched set. QQP and MRPC: F1, CoLA: Matthews' correlation, STS-B: Spearman's, others: accuracy; "
        "all times 100.",
    ]
    compared = sum(1 for row in table.rows for d in row.differences.values() if d.low is not None)
    if compared:
        notes.append(
            f"{compared} intervals are shown; about {compared * (1 - CONFIDENCE):.1f} of them miss by chance."
        )
    if table.missing:
        notes.append(f"There is no result of {', '.join(table.missing)}: averages with it are left out.")
    return "\n".join([*lines, *notes]) + "\n"


def _line(head: str, cells: Sequence[str]) -> str:
    return f"| {head} | " + " | ".join(cells) + " |"


def _score(value: Estimate | None) -> str:
    if value is None:
        return "–"
    return f"{value.mean:.1f}" + _half(value)


def _difference(value: Estimate | None) -> str:
    if value is None:
        return "–"
    return f"{value.mean:+.1f}".replace("-", "−") + _half(value)


def _half(value: Estimate) -> str:
    if value.low is None or value.high is None or math.isnan(value.low):
        return ""
    return f" ± {(value.high - value.low) / 2:.1f}"
