"""compare: paired, resumable, readable afterwards, and never mixing two experiments."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.tiny import same, tiny_recipe, weights
from wellcond.monitor import read_lines
from wellcond.report import write_report
from wellcond.training import compare as module
from wellcond.training.arms import Arm, select_arms
from wellcond.training.compare import compare
from wellcond.training.nonfinite import NonFiniteLoss
from wellcond.training.records import complete_lines

ARMS = select_arms(["baseline", "conditioned"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared")
    compare(tiny_recipe(), ARMS, [0, 1], out, command="wellcond compare tiny", hypotheses=["none"])
    return out


def test_the_folder_holds_what_the_report_reads(folder: Path) -> None:
    results = read_lines(folder / "results.jsonl")
    assert {(line["arm"], line["seed"]) for line in results} == {
        (arm, seed) for arm in ("baseline", "conditioned") for seed in (0, 1)
    }
    rows = read_lines(folder / "rows.jsonl")
    for arm in ("baseline", "conditioned"):
        steps = [row["step"] for row in rows if (row["arm"], row["seed"], row["site"]) == (arm, 1, "tokens")]
        assert steps == [0, 2, 4, 6, 8]
    assert [point["step"] for point in results[0]["curve"]] == [2, 4, 6, 8]
    record = json.loads((folder / "run.json").read_text())
    assert (record["seeds"], record["hypotheses"], record["command"]) == (
        [0, 1],
        ["none"],
        "wellcond compare tiny",
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["baseline"]["difference"] is None
    values = [
        {line["seed"]: line["metrics"]["accuracy"] for line in results if line["arm"] == arm}
        for arm in ("conditioned", "baseline")
    ]
    expected = sum(values[0][seed] - values[1][seed] for seed in (0, 1)) / 2
    assert summary["conditioned"]["difference"]["mean"] == pytest.approx(expected)
    assert summary["conditioned"]["kappa_start"]["tokens"] < summary["baseline"]["kappa_start"]["tokens"]
    page = write_report(folder)
    assert "A tiny ViT" in page.read_text()


def test_a_finished_folder_runs_nothing_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a finished run was run again")

    monkeypatch.setattr(module, "train_arm", refuse)
    before = (folder / "results.jsonl").read_text(), (folder / "rows.jsonl").read_text()
    table = compare(tiny_recipe(), ARMS, [0, 1], folder, command="again")
    assert [line.metric.n for line in table] == [2, 2]
    assert before == ((folder / "results.jsonl").read_text(), (folder / "rows.jsonl").read_text())


def test_what_a_killed_process_left_is_dropped_and_made_again(folder: Path, tmp_path: Path) -> None:
    for name in ("results.jsonl", "rows.jsonl", "run.json", "spectra.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    whole = read_lines(folder / "results.jsonl")
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text(
        "".join(lines[:-1]) + lines[-1][:20]
    )  # cut while the last was written
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"step": 0, "si')
    compare(tiny_recipe(), ARMS, [0, 1], tmp_path, command="again")
    again = read_lines(tmp_path / "results.jsonl")
    for line in whole + again:
        del line["seconds_per_step"]
    assert again == whole
    assert sorted(map(str, read_lines(tmp_path / "rows.jsonl"))) == sorted(
        map(str, read_lines(folder / "rows.jsonl"))
    )


def test_a_line_without_its_end_counts_as_not_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}')
    assert complete_lines(path) == [{"a": 1}]
    assert path.read_text() == '{"a": 1}\n'


def test_damage_elsewhere_is_not_repaired_silently(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        complete_lines(path)


def test_another_experiment_in_the_folder_is_refused(folder: Path) -> None:
    before = (folder / "run.json").read_text()
    with pytest.raises(ValueError, match="another experiment"):
        compare(tiny_recipe(epochs=3), ARMS, [0, 1], folder, command="other")
    with pytest.raises(ValueError, match="another experiment"):
        compare(tiny_recipe(name="other"), ARMS, [0, 1], folder, command="other")
    assert (folder / "run.json").read_text() == before


def test_arms_share_initial_weights_and_order_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial: list[dict[str, Tensor]] = []

    def watch(arm: Arm) -> Arm:
        def change(model: nn.Module, batch: Tensor) -> None:
            initial.append(weights(model))
            torch.rand(3)  # an arm may use random numbers: the order of data must not depend on it
            arm.apply_(model, batch)

        return dataclasses.replace(arm, change=change)

    recipe = tiny_recipe(epochs=1)
    orders = []
    for seed in (0, 1):
        for arm in ARMS:
            order = tmp_path / f"{arm.name}-{seed}.txt"
            monkeypatch.setenv("BATCHES", str(order))
            compare(recipe, [watch(arm)], [seed], tmp_path / f"{arm.name}-{seed}", command="x")
            orders.append(order.read_text().splitlines())
    assert same(initial[0], initial[1])
    assert same(initial[2], initial[3])
    assert not same(initial[0], initial[2])
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    assert orders[0] != orders[2]
    assert len(orders[0]) == 4


def test_a_loss_that_is_not_finite_names_the_run(tmp_path: Path) -> None:
    def poison(model: nn.Module, batch: Tensor) -> None:
        with torch.no_grad():
            model.get_submodule("head").weight.fill_(float("nan"))

    with pytest.raises(NonFiniteLoss, match="arm poisoned, seed 4: step 1 was not taken"):
        compare(tiny_recipe(), [Arm("poisoned", "bad weights", poison)], [4], tmp_path, command="x")
    assert not (tmp_path / "results.jsonl").exists()


def test_a_shorter_comparison_is_another_experiment(tmp_path: Path) -> None:
    compare(tiny_recipe(), ARMS[:1], [0], tmp_path, command="x", max_steps=2, subset=32)
    (line,) = read_lines(tmp_path / "results.jsonl")
    assert line["curve"][-1]["step"] == 2
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert (config["max_steps"], config["subset"]) == (2, 32)
    with pytest.raises(ValueError, match="another experiment"):
        compare(tiny_recipe(), ARMS[:1], [0], tmp_path, command="x")
