"""GLUE's table: the paper's order, averages only of what is there, intervals as of the statistics."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from wellcond.cli import main
from wellcond.data.glue import GLUE
from wellcond.report.glue import AVERAGES, COLUMNS, PAPER, glue_markdown, read_glue_table

SCORES = {
    "mnli": ("accuracy_matched", "accuracy_mismatched"), "sst2": ("accuracy",), "rte": ("accuracy",),
    "qnli": ("accuracy",), "qqp": ("f1", "accuracy"), "mrpc": ("f1", "accuracy"),
    "cola": ("matthews", "accuracy"), "stsb": ("spearman", "pearson"),
}  # fmt: skip


def value(task: str, score: str, arm: str, seed: int) -> float:
    place = list(SCORES).index(task) * 10 + SCORES[task].index(score)
    return (
        40.0
        + place / 2
        + seed * (0.5 + place % 3)
        + (1.0 + 0.3 * seed * (place % 2) if arm == "conditioned" else 0.0)
    )


def write(runs: Path, tasks: tuple[str, ...] = tuple(SCORES), seeds: int = 3) -> Path:
    for task in tasks:
        folder = runs / f"glue-{task}"
        folder.mkdir(parents=True)
        lines = [
            {"arm": arm, "seed": seed, "metrics": {s: value(task, s, arm, seed) for s in SCORES[task]}}
            for seed in range(seeds)
            for arm in ("conditioned", "baseline")
        ]
        (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return runs


def test_the_columns_are_scores_that_the_tasks_have_in_the_papers_order() -> None:
    assert [name for name, _, _ in COLUMNS[:7]] == ["MNLI", "SST-2", "RTE", "QNLI", "QQP", "MRPC", "CoLA"]
    for _, task, score in COLUMNS:
        assert score.split("_")[0] in GLUE[task].metrics
    assert {task for _, task, _ in COLUMNS} == set(GLUE)


def test_the_papers_average_is_not_that_of_its_columns() -> None:
    """What the module says about it."""
    for arm, average, sts_b in (("baseline", 78.6, 86.3), ("conditioned", 79.7, 86.8)):
        assert abs(np.mean(PAPER[arm]) - average) > 0.9
        assert np.mean([*PAPER[arm], sts_b]) == pytest.approx(average, abs=0.01)


def test_means_differences_and_intervals(tmp_path: Path) -> None:
    table = read_glue_table(write(tmp_path))
    assert [row.arm for row in table.rows] == ["baseline", "conditioned"]
    base, conditioned = table.rows
    assert not base.differences
    assert table.missing == ()
    for name, task, score in COLUMNS:
        a, b = ([value(task, score, arm, s) for s in range(3)] for arm in ("conditioned", "baseline"))
        found = conditioned.differences[name]
        assert conditioned.scores[name].mean == pytest.approx(np.mean(a))
        assert found.mean == pytest.approx(np.mean(a) - np.mean(b))
        low, high = stats.t.interval(
            0.95, 2, np.mean(np.subtract(a, b)), stats.sem(np.subtract(a, b)) or 1e-300
        )
        assert (found.low, found.high) == pytest.approx((low, high))


def test_averages_are_taken_seed_by_seed(tmp_path: Path) -> None:
    table = read_glue_table(write(tmp_path))
    of = {name: (task, score) for name, task, score in COLUMNS}
    for name, columns in AVERAGES:
        per_seed = [
            np.mean([value(*of[c], "conditioned", s) - value(*of[c], "baseline", s) for c in columns])
            for s in range(3)
        ]
        found = table.rows[1].differences[name]
        assert found.mean == pytest.approx(np.mean(per_seed))
        assert found.high - found.low == pytest.approx(2 * stats.sem(per_seed) * stats.t.ppf(0.975, 2))


def test_an_average_without_one_of_its_tasks_is_left_out(tmp_path: Path) -> None:
    table = read_glue_table(write(tmp_path, tuple(task for task in SCORES if task != "stsb")))
    assert table.missing == ("stsb",)
    assert "avg of 7" in table.rows[0].scores
    assert "avg of 8" not in table.rows[0].scores
    text = glue_markdown(table)
    assert "no result of stsb" in text
    assert text.splitlines()[2].count("–") == 3


def test_the_page(tmp_path: Path) -> None:
    text = glue_markdown(read_glue_table(write(tmp_path)))
    lines = text.splitlines()
    assert lines[0].startswith("| | MNLI | SST-2 | RTE | QNLI | QQP | MRPC | CoLA | avg of 7 |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "conditioned − baseline" in text
    assert "| baseline, the paper's | 83.8 | 92.3 | 55.1 | 90.1 | 87.3 | 85.0 | 48.9 | 77.5 |" in text
    assert "12 intervals are shown; about 0.6 of them miss by chance" in text


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glue", str(write(tmp_path / "runs"))]) == 0
    assert capsys.readouterr().out == glue_markdown(read_glue_table(tmp_path / "runs"))
    assert main(["glue", str(tmp_path)]) == 2
    assert "wellcond compare glue-rte --out" in capsys.readouterr().err


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    text = glue_markdown(read_glue_table(write(tmp_path, seeds=1)))
    assert "± " not in "".join(line for line in text.splitlines() if line.startswith("|"))


def test_missing_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"glue-TASK/results\.jsonl"):
        read_glue_table(tmp_path)
    write(tmp_path, ("rte",))
    file = tmp_path / "glue-rte" / "results.jsonl"
    file.write_text(file.read_text().replace("accuracy", "other"))
    with pytest.raises(ValueError, match="a result of conditioned, seed 0, has no accuracy"):
        read_glue_table(tmp_path)
