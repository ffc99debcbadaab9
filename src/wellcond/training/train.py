"""``wellcond train``: one arm, one seed, with checkpoints to go on from, in one process or under torchrun."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellcond.data import Split
from wellcond.monitor import JsonLines, Row, append_lines
from wellcond.recipes import Recipe
from wellcond.training.arms import Arm
from wellcond.training.checkpoints import last_checkpoint, step_of
from wellcond.training.compare import summarise
from wellcond.training.engine import Progress, Score
from wellcond.training.nonfinite import NonFiniteLoss
from wellcond.training.records import complete_lines, found_in, replace_lines, write_json, write_run
from wellcond.training.run import Keeping, RunResult, thinned, total_steps, train_arm


def checkpoints_of(folder: Path) -> Path:
    """Where a run folder has its checkpoints."""
    return folder / "checkpoints"


def is_first_process() -> bool:
    """Whether this process writes: the only one, or rank 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


def train(
    recipe: Recipe,
    arm: Arm,
    seed: int,
    folder: Path,
    *,
    data: Split,
    command: str,
    max_steps: int | None = None,
    subset: int | None = None,
    save_every: int | None = None,
    pretrained: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    score: Score | None = None,
) -> RunResult:
    """Train into a run folder that `wellcond.report` reads, with ``checkpoints/checkpoint-STEP`` in it.

    Args:
        recipe, arm, seed: what is trained.
        folder: of the results. The first process alone writes into it, but for its part of the checkpoints.
        data: the recipe's samples.
        command: how to run it again.
        max_steps, subset: for a smoke run, see `train_arm`.
        save_every: steps between checkpoints; default: as many checkpoints as evaluations.
        pretrained: what the recipe starts from, for ``run.json``.
        resume: go on from the newest checkpoint in ``folder``, to the bit on a CPU; start if there is none.
        progress, score: told of steps and of points of the learning curve.

    Raises:
        ValueError: the folder holds a run already and ``resume`` is off, the run is of another configuration or it
            is finished.
        NonFiniteLoss: the message names the first bad module and the last good checkpoint.
    """
    checkpoints, results, rows = checkpoints_of(folder), folder / "results.jsonl", folder / "rows.jsonl"
    start = last_checkpoint(checkpoints)
    if results.is_file():
        raise ValueError(f"{folder} holds finished runs; give another --out, or delete the folder")
    if start is not None and not resume:
        raise ValueError(
            f"{folder} holds a run that got to {start.name}; --resume goes on from there, "
            f"another --out starts a new one"
        )
    steps = total_steps(recipe, len(thinned(data.train, subset)), max_steps)  # type: ignore[arg-type]
    kept: list[dict[str, Any]] = []
    if is_first_process():
        kept = _rows_until(rows, -1 if start is None else step_of(start))
        folder.mkdir(parents=True, exist_ok=True)
        options = {"arm": arm.name, "seed": seed, "max_steps": max_steps, "subset": subset} | found_in(data)
        options |= {} if pretrained is None else {"pretrained": str(pretrained)}
        if start is None:
            (folder / "run.json").unlink(missing_ok=True)
        write_run(folder, recipe, [arm], [seed], command, options=options)
        replace_lines(rows, kept)
    keeping = Keeping(
        save_every=save_every or max(1, steps // recipe.evaluations),
        resume=start,
        rows=[_row(line) for line in kept],
        sink=JsonLines(rows, arm=arm.name, seed=seed) if is_first_process() else None,
        score=score,
    )
    try:
        result = train_arm(
            recipe,
            data,
            arm,
            seed,
            checkpoints,
            progress,
            max_steps=max_steps,
            subset=subset,
            keeping=keeping,
        )
    except NonFiniteLoss as error:
        good = last_checkpoint(checkpoints)
        raise NonFiniteLoss(f"{error} Last good checkpoint: {good or 'none yet'}") from error
    if is_first_process():
        write_json(folder / "spectra.json", {arm.name: result.spectra})
        if result.examples:
            write_json(folder / "examples.json", {arm.name: result.examples})
        append_lines(results, [result.line()])
        write_json(
            folder / "summary.json",
            {line.arm.name: line.to_dict() for line in summarise(folder, [arm], recipe.task.metric)},
        )
    return result


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Measurements up to a step; later ones are made again after it."""
    return [line for line in complete_lines(path) if line["step"] <= step] if path.is_file() else []


def _row(line: Mapping[str, Any]) -> Row:
    return Row(**{field.name: line[field.name] for field in dataclasses.fields(Row)})
