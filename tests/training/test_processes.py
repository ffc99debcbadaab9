"""Two processes on gloo train as one does with the same batch; only the first writes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import wellcond as wc
from tests.training.processes import plain_model
from tests.training.tiny import tiny_recipe
from wellcond.monitor import read_lines
from wellcond.training.arms import select_arms
from wellcond.training.compare import compare
from wellcond.training.run import process_batch

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process and what two processes left."""
    found = []
    for name, launcher in (("one", []), ("two", TORCHRUN)):
        folder = tmp_path_factory.mktemp(name)
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "tests.training.processes", str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(folder)
    return found[0], found[1]


def entries(folder: Path, key: str) -> list[Any]:
    state = json.loads((folder / "run" / "checkpoints" / "checkpoint-8" / "trainer_state.json").read_text())
    return [entry[key] for entry in state["log_history"] if key in entry]


@needs_gloo
@pytest.mark.slow
def test_losses_and_weights_are_those_of_one_process(folders: tuple[Path, Path]) -> None:
    one, two = folders
    for key in ("loss", "eval_loss", "grad_norm"):
        assert len(entries(one, key)) == 8
        assert entries(two, key) == pytest.approx(entries(one, key), rel=1e-4)
    assert entries(two, "eval_accuracy") == entries(one, "eval_accuracy")
    weights = [load_file(f / "run" / "checkpoints" / "checkpoint-8" / "model.safetensors") for f in folders]
    for name, tensor in weights[0].items():
        assert torch.allclose(weights[1][name], tensor, rtol=1e-3, atol=1e-4), name


@needs_gloo
@pytest.mark.slow
def test_the_learning_rate_follows_optimizer_steps(folders: tuple[Path, Path]) -> None:
    one, two = (entries(folder, "learning_rate") for folder in folders)
    # The rate that step k = 0, 1, ... used: half a cosine over eight steps, no warm-up in so short a run.
    expected = [1e-2 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
    assert one == two
    assert one == pytest.approx(expected)


@needs_gloo
@pytest.mark.slow
def test_only_the_first_process_measures_and_writes_once(folders: tuple[Path, Path]) -> None:
    one, two = folders
    assert (two / "measured-1").read_text() == "0"
    assert (two / "measured-0").read_text() == (one / "measured-0").read_text()
    rows = [read_lines(folder / "run" / "rows.jsonl") for folder in folders]
    keys = [[(row["step"], row["site"], row["layer"], row["head"]) for row in table] for table in rows]
    assert keys[0] == keys[1]
    assert len(set(keys[1])) == len(keys[1])
    assert [row["sigma_max"] for row in rows[1]] == pytest.approx(
        [row["sigma_max"] for row in rows[0]], rel=1e-2
    )
    assert len(read_lines(two / "run" / "results.jsonl")) == 1


@needs_gloo
@pytest.mark.slow
def test_a_checkpoint_of_two_processes_loads_into_a_plain_model(folders: tuple[Path, Path]) -> None:
    checkpoint = folders[1] / "run" / "checkpoints" / "checkpoint-8"
    model = plain_model()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    assert wc.restore_(model, checkpoint).config is not None
    assert sorted(path.name for path in checkpoint.glob("rng_state*")) == [
        "rng_state_0.pth",
        "rng_state_1.pth",
    ]


@needs_gloo
@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_one_process_stops_both(folders: tuple[Path, Path]) -> None:
    messages = [(folders[1] / f"stopped-{rank}").read_text() for rank in (0, 1)]
    for message in messages:
        assert message.startswith("step 3 was not taken")
        assert message.endswith("checkpoint-2")
    assert "'blocks.0.ls1'" in messages[1]
    assert "another process" in messages[0]


def test_a_batch_that_processes_cannot_share_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert process_batch(tiny_recipe()) == 4
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3 processes cannot share a batch of 16"):
        process_batch(tiny_recipe())
    with pytest.raises(ValueError, match="a comparison runs in one process, and 3 were started"):
        compare(tiny_recipe(), select_arms(["baseline"]), [0], tmp_path, command="x")


def test_sharding_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP"):
        compare(tiny_recipe(), select_arms(["baseline"]), [0], tmp_path, command="x")
    assert not (tmp_path / "results.jsonl").exists()
