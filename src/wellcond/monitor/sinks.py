"""Where rows go: JSON lines that a strict parser reads, one measurement appended at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wellcond.monitor.rows import Row


class JsonLines:
    """Appends rows to a file, one JSON object per line, with extra fields of your own in each.

    ``inf`` and ``nan`` are not JSON: they are written as the strings ``"inf"``, ``"-inf"``, ``"nan"`` and
    `read_lines` turns them back.

    Args:
        path: the file; its folder is made.
        extra: fields for every line, such as ``arm="baseline", seed=0``.
    """

    def __init__(self, path: str | Path, **extra: Any) -> None:
        self.path = Path(path)
        self.extra = extra

    def __call__(self, rows: Iterable[Row]) -> None:
        append_lines(self.path, ({**row.to_dict(), **self.extra} for row in rows))


def append_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append records to a JSON-lines file in one write."""
    text = "".join(json.dumps(encode(record), allow_nan=False) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; ValueError names the file and line that is not JSON."""
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(decode(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return records


def encode(value: Any) -> Any:
    """Non-finite numbers as strings, in depth.

    >>> encode({"kappa": float("inf"), "sigma": [1.0, float("nan")]})
    {'kappa': 'inf', 'sigma': [1.0, 'nan']}
    """
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value
