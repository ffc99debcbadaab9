"""Reading a run folder: whole, and broken in every way that names file and line."""

import json
import math

import pytest

from tests.report.synthetic import row, write_run
from wellcond.monitor import append_lines
from wellcond.report import read_run, write_report

TWO = ("baseline", "conditioned")


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", arms=TWO, layers=1, heads=1)


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_reads_what_was_written(folder):
    run = read_run(folder)
    assert [arm.name for arm in run.arms] == list(TWO)
    assert run.baseline.name == "baseline"
    assert run.metric.name == "accuracy"
    assert list(run.results_of("conditioned")) == [0, 1, 2]
    assert run.table["conditioned"].difference.low < run.table["conditioned"].difference.high
    assert run.table["baseline"].difference is None
    assert len(run.rows) == 2 * 3 * 9 * 2
    assert run.spectra["baseline"].after is None


def test_infinite_kappa_is_read_back_as_infinite(tmp_path):
    run = read_run(write_run(tmp_path / "run", arms=TWO, infinite=("baseline",)))
    kappas = [item.row.kappa for item in run.rows if item.arm == "baseline" and item.row.site == "tokens"]
    assert kappas
    assert all(math.isinf(kappa) for kappa in kappas)
    assert math.isinf(run.table["baseline"].kappa["tokens"])


def test_first_arm_is_the_baseline_where_none_has_the_name(tmp_path):
    assert read_run(write_run(tmp_path / "run", arms=("scaled", "positions"))).baseline.name == "scaled"


def test_fields_of_a_later_version_are_let_pass(folder):
    change(folder / "run.json", colour="blue")
    append_lines(folder / "rows.jsonl", [{**row("baseline", 0, 999, "tokens", None, None, 2.0), "new": 1}])
    assert read_run(folder).rows[-1].row.step == 999


def test_empty_results_are_a_clear_error(folder):
    (folder / "results.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"results\.jsonl is empty: no run of this folder has finished"):
        write_report(folder)


@pytest.mark.parametrize("name", ["run.json", "results.jsonl", "summary.json"])
def test_missing_necessary_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        write_report(folder)


@pytest.mark.parametrize("name", ["run.json", "results.jsonl", "rows.jsonl", "summary.json", "spectra.json"])
def test_truncated_file_is_named_with_its_line(folder, name):
    text = (folder / name).read_text()
    (folder / name).write_text(text[: len(text) - 20])
    with pytest.raises(ValueError, match=rf"{name.replace('.', '[.]')}, line \d+ is not JSON"):
        write_report(folder)


@pytest.mark.parametrize("name", ["results.jsonl", "rows.jsonl"])
def test_repeated_line_is_an_error(folder, name):
    lines = (folder / name).read_text().splitlines()
    (folder / name).write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(
        ValueError, match=rf"{name.replace('.', '[.]')}, line {len(lines) + 1} repeats line 2"
    ):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("results.jsonl", {"seed": 0, "metrics": {}}, r"line 7: missing arm; found seed, metrics"),
        ("results.jsonl", {"arm": "other", "seed": 0, "metrics": {}}, r"line 7: arm 'other' is not in run.json"),
        ("results.jsonl", {"arm": "baseline", "seed": 9, "metrics": {"loss": 1}}, r"line 7: metrics has no 'accuracy'"),
        ("results.jsonl", {"arm": "baseline", "seed": "9", "metrics": {}}, r"line 7: 'seed' must be int, not '9'"),
        ("results.jsonl", [1], r"line 7: an object is expected, not list"),
        ("rows.jsonl", {"arm": "baseline", "seed": 0, "step": 1}, r"line 109: missing site, layer"),
    ],
)  # fmt: skip
def test_wrong_line_is_named_with_its_field(folder, name, line, message):
    with (folder / name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=rf"{name.replace('.', '[.]')}, {message}"):
        read_run(folder)


def test_wrong_fields_of_run_and_spectra_are_named(folder):
    change(folder / "run.json", metric={"name": "accuracy"})
    with pytest.raises(ValueError, match=r"run\.json, metric: missing higher_is_better; found name"):
        read_run(folder)
    change(folder / "run.json", metric={"name": "accuracy", "higher_is_better": True})
    change(folder / "spectra.json", baseline={"before": [1.0, "big"]})
    with pytest.raises(
        ValueError, match=r"spectra\.json, arm 'baseline': 'before' must be a list of numbers"
    ):
        read_run(folder)


def test_repeated_arm_is_an_error(folder):
    arms = json.loads((folder / "run.json").read_text())["arms"]
    change(folder / "run.json", arms=[*arms, arms[0]])
    with pytest.raises(ValueError, match=r"run\.json: the names of the arms repeat"):
        read_run(folder)


def test_verdict_stronger_than_its_interval_is_refused(folder):
    line = json.loads((folder / "summary.json").read_text())["conditioned"]
    line["difference"] = {"mean": 4.0, "low": -1.0, "high": 9.0, "effect": 0.5}
    change(folder / "summary.json", conditioned={**line, "verdict": "better"})
    with pytest.raises(
        ValueError, match=r"summary\.json, arm 'conditioned': the verdict 'better' is stronger"
    ):
        write_report(folder)
