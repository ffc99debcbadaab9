"""The commands as people start them: plain in a pipe, one sentence for a mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny import tiny_recipe
from wellcond.cli import main
from wellcond.recipes import RECIPES


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", tiny_recipe())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "no-such"], "no recipe 'no-such'; there are"),
        (["train", "no-such"], "no recipe 'no-such'; there are"),
        (["compare", "tiny", "--arms", "baseline,bseline"], "unknown arms ['bseline']; choose among"),
        (["train", "tiny", "--arm", "bseline"], "unknown arms ['bseline']; choose among"),
        (["train", "tiny", "--conditioned", "--arm", "static"], "--conditioned means --arm conditioned"),
        (["train", "tiny", "--max-steps", "0"], "--max-steps counts from 1, got 0"),
        (["train", "tiny", "--subset", "-1"], "--subset counts from 1, got -1"),
        (["compare", "tiny", "--seeds", "0"], "--seeds counts from 1"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_a_mistake_ends_with_one_sentence_and_2(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("wellcond: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("tiny")
def test_train_says_where_things_are_and_a_second_call_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["train", "tiny", "--conditioned", "--out", str(out), "--max-steps", "4", "--subset", "32"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "step 2/4: train_loss" in shown
    assert "step 4/4: train_loss" in shown
    assert f"Report:      {out / 'report.html'}" in shown
    assert (out / "report.html").is_file()
    assert (out / "checkpoints" / "checkpoint-4" / "wellcond.json").is_file()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(arguments) == 2
    assert main([*arguments, "--resume"]) == 2
    assert "holds finished runs" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def started(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # COLUMNS and a terminal's name, as in a real shell: what decides is whether the output is a terminal.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "wellcond", *arguments],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_fresh_process_in_a_pipe_writes_plain_lines(tmp_path: Path) -> None:
    arguments = ["compare", "digits-vit", "--seeds", "1", "--epochs", "1", "--arms", "baseline,conditioned"]
    done = started([*arguments, "--out", "out"], tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert "\r" not in text
        assert "\x1b[" not in text
    assert "run 2/2: conditioned, seed 0: accuracy" in done.stdout
    assert "Report: out/report.html" in done.stdout
    trained = started(["train", "digits-vit", "--max-steps", "2", "--subset", "64", "--out", "one"], tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "\r" not in trained.stdout + trained.stderr
    assert "\x1b[" not in trained.stdout + trained.stderr
    assert "step 2/2: train_loss" in trained.stdout
    wrong = started(["train", "nothing"], tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
