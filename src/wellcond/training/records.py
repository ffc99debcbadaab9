"""The files of a run folder, written so that a kill at any moment leaves them readable."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wellcond.data import Split
from wellcond.monitor import append_lines, read_lines
from wellcond.monitor.sinks import encode
from wellcond.recipes import Recipe
from wellcond.training.arms import Arm

LIBRARIES = ("torch", "timm", "transformers", "accelerate", "scikit-learn")


def write_run(
    folder: Path,
    recipe: Recipe,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    command: str,
    hypotheses: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write ``run.json``; ValueError if it is there and of another recipe or configuration.

    ``options`` are further fields of the configuration, such as the number of steps.
    """
    config = recipe.config() | dict(options or {})
    record = {
        "recipe": recipe.name,
        "title": recipe.title,
        "command": command,
        "arms": [
            {"name": a.name, "description": a.description, "leaks": a.leaks, "control": a.control}
            for a in arms
        ],
        "seeds": list(seeds),
        "metric": dataclasses.asdict(recipe.task.metric),
        "versions": {"python": platform.python_version(), **_versions()},
        "config": config,
        "hypotheses": list(hypotheses),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_accelerator()}",
    }
    path = folder / "run.json"
    if path.is_file():
        before = json.loads(path.read_text())
        for key in ("recipe", "config"):
            if before[key] != json.loads(json.dumps(record[key])):
                raise ValueError(
                    f"{folder} holds runs of another experiment ({key} was {before[key]}, now {record[key]}); "
                    f"give another --out, or delete the folder"
                )
    write_json(path, record)


def found_in(data: Split) -> dict[str, Any]:
    """The field of the configuration with what was found in the data; none where nothing was said.

    >>> found_in(Split([], [], {"vocabulary": "a1b2"})), found_in(Split([], []))
    ({'data': {'vocabulary': 'a1b2'}}, {})
    """
    return {"data": dict(data.details)} if data.details else {}


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file; what follows the last line break was cut off by a kill and is removed."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return read_lines(path)


def replace_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file anew, in one step: a kill leaves the old or the new one."""
    replacement = path.with_suffix(".tmp")
    replacement.unlink(missing_ok=True)
    append_lines(replacement, (dict(line) for line in lines))
    replacement.replace(path)


def _versions() -> dict[str, str]:
    return {"wellcond": importlib.metadata.version("wellcond")} | {
        name: importlib.metadata.version(name) for name in LIBRARIES
    }


def _accelerator() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator"


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, numbers that are not finite as strings; the file is replaced in one step."""
    replacement = path.with_suffix(".tmp")
    replacement.write_text(json.dumps(encode(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    replacement.replace(path)
