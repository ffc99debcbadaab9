"""Checkpoints that exist whole or not at all: written beside, then renamed into place."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from torch import nn

from wellcond.checkpoint import CONFIG_FILE, record_of, restore_, save_config

UNFINISHED = "unfinished"
KEPT = 2


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest ``checkpoint-STEP`` in a folder; None if there is none.

    >>> last_checkpoint("no/such/folder") is None
    True
    """
    found = _by_step(Path(folder))
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """
    >>> step_of(Path("checkpoints/checkpoint-120"))
    120
    """
    return int(checkpoint.name.rpartition("-")[2])


def publish(staged: Path, folder: Path) -> Path:
    """Move a checkpoint that is completely written into ``folder`` and delete all but the newest two.

    A directory is renamed in one step, so a process killed at any moment leaves ``checkpoint-STEP`` absent or whole.
    """
    unfinished = folder / UNFINISHED
    target = folder / staged.name
    if target.exists():
        _delete(target, unfinished)
    staged.rename(target)
    for old in _by_step(folder)[:-KEPT]:
        _delete(old, unfinished)
    return target


def discard_unfinished(folder: Path) -> None:
    """Delete what a killed process left half written or half deleted."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


def write_conditioning(model: nn.Module, checkpoint: Path) -> None:
    """``wellcond.json`` beside the weights, if the model is conditioned."""
    if record_of(model) is not None:
        save_config(model, checkpoint)


def read_conditioning_(model: nn.Module, checkpoint: Path) -> None:
    """Condition a model as the checkpoint was, σ₁ of a static correction included, if it was."""
    if (checkpoint / CONFIG_FILE).is_file():
        from wellcond.attach import remove_

        remove_(model)
        restore_(model, checkpoint)


def _by_step(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def _delete(path: Path, unfinished: Path) -> None:
    """Out of sight first: a directory half deleted must not be taken for a checkpoint."""
    unfinished.mkdir(exist_ok=True)
    hidden = unfinished / f"old-{path.name}"
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)
