"""kill -9 and on: to the bit what a run without a stop gives, wherever the kill came."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import wellcond as wc
from tests.training.killing import KILLS, MANY_STEPS
from tests.training.tiny import same, tiny_data, tiny_model, tiny_recipe
from wellcond.monitor import read_lines
from wellcond.training.arms import select_arms
from wellcond.training.checkpoints import UNFINISHED, last_checkpoint, publish
from wellcond.training.train import train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of ``tests.training.killing``."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.killing", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def log_of(checkpoint: Path) -> list[dict[str, Any]]:
    """Losses, learning rates, gradient norms and scores by step, without what a clock says."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    clocks = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(clocks)} for entry in history]


def assert_same_run(a: Path, b: Path, steps: int) -> None:
    last = Path("checkpoints") / f"checkpoint-{steps}"
    assert same(load_file(a / last / "model.safetensors"), load_file(b / last / "model.safetensors"))
    assert log_of(a / last) == log_of(b / last)
    assert (a / "rows.jsonl").read_text() == (b / "rows.jsonl").read_text()
    results = [read_lines(folder / "results.jsonl") for folder in (a, b)]
    for (line,) in results:
        del line["seconds_per_step"]
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["baseline", "static"])
def test_six_steps_are_three_a_kill_and_three(killed: tuple[Path, str], arm: str) -> None:
    folder = killed[0] / arm
    assert_same_run(folder / "whole", folder / "killed", 6)
    log = log_of(folder / "killed" / "checkpoints" / "checkpoint-6")
    assert [entry["step"] for entry in log if "learning_rate" in entry] == [1, 2, 3, 4, 5, 6]
    steps = [row["step"] for row in read_lines(folder / "killed" / "rows.jsonl") if row["site"] == "tokens"]
    assert steps == [0, 2, 4, 6]
    whole, order = ((folder / name).read_text().split() for name in ("whole.txt", "killed.txt"))
    assert len(set(whole)) == 6
    # The killed process saw the fourth batch too, and what it made of it was lost.
    assert order[:4] == whole[:4]
    assert order[4:] == whole[3:]


@pytest.mark.slow
def test_killed_at_random_points_the_last_checkpoint_loads_and_nothing_is_lost(
    killed: tuple[Path, str],
) -> None:
    folder, output = killed
    kills = [line for line in output.splitlines() if line.startswith("kill ")]
    assert len(kills) == KILLS >= 20
    assert_same_run(folder / "often-whole", folder / "often", MANY_STEPS)
    assert not (folder / "often" / "checkpoints" / UNFINISHED / f"checkpoint-{MANY_STEPS}").exists()


def run(folder: Path, resume: bool = False, arm: str = "conditioned", **changes: Any) -> None:
    train(
        tiny_recipe(**changes),
        select_arms([arm])[0],
        0,
        folder,
        data=tiny_data(),
        command="x",
        max_steps=3,
        save_every=1,
        resume=resume,
    )


def test_a_checkpoint_is_a_plain_one_that_remembers_its_conditioning(tmp_path: Path) -> None:
    run(tmp_path)
    checkpoint = last_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert sorted(path.name for path in checkpoint.parent.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    model = tiny_model().eval()
    assert load_file(checkpoint / "model.safetensors").keys() == model.state_dict().keys()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    wc.restore_(model, checkpoint)
    last = [
        row for row in read_lines(tmp_path / "rows.jsonl") if row["step"] == 3 and row["site"] == "tokens"
    ]
    # Measured on the same eight images after the last step.
    assert wc.measure(model, tiny_data().test.pixels[:8])[0].kappa_pinv == pytest.approx(
        last[0]["kappa_pinv"]
    )


def test_only_a_conditioned_model_has_a_record(tmp_path: Path) -> None:
    run(tmp_path, arm="baseline")
    assert not list(tmp_path.rglob("wellcond.json"))


def test_a_run_that_was_stopped_is_not_overwritten_without_resume(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "results.jsonl").unlink()
    with pytest.raises(ValueError, match="got to checkpoint-3; --resume goes on"):
        run(tmp_path)
    with pytest.raises(ValueError, match="another experiment"):
        run(tmp_path, resume=True, learning_rate=0.5)
    rows = (tmp_path / "rows.jsonl").read_text()
    run(tmp_path, resume=True)  # killed after its last step: only the result was missing
    assert (tmp_path / "rows.jsonl").read_text() == rows
    assert len(read_lines(tmp_path / "results.jsonl")) == 1


def test_resume_without_a_checkpoint_starts_anew_and_drops_old_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 0, "site": "tokens"}\n{"st')
    (tmp_path / "checkpoints" / UNFINISHED / "checkpoint-1").mkdir(parents=True)
    run(tmp_path, resume=True)
    steps = [row["step"] for row in read_lines(tmp_path / "rows.jsonl") if row["site"] == "tokens"]
    assert steps == [0, 1, 2, 3]


def test_checkpoints_are_ordered_by_number_and_two_are_kept(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (8, 9, 10, 10):
        staged = tmp_path / UNFINISHED / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        torch.save(step, staged / "step.pt")
        publish(staged, tmp_path)
    (tmp_path / "checkpoint-final").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-[0-9]*")) == [
        "checkpoint-10",
        "checkpoint-9",
    ]
