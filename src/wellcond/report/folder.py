"""A run folder, read and checked: every error names the file, and the line where there is one."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from wellcond.monitor.rows import Row
from wellcond.monitor.sinks import decode, read_lines

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train: its name, what it does, whether positions see later ones, and whether it is a control."""

    name: str
    description: str = ""
    leaks: bool = False
    control: bool = False


@dataclasses.dataclass(frozen=True)
class Metric:
    """What the arms are compared by; ``name`` is its key in every result's ``metrics``."""

    name: str
    higher_is_better: bool
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished run: final metrics, cost, and the learning curve as points ``{"step": ..., key: value}``."""

    arm: str
    seed: int
    metrics: Mapping[str, float]
    seconds_per_step: float | None = None
    peak_memory_mb: float | None = None
    curve: Sequence[Mapping[str, float]] = ()


@dataclasses.dataclass(frozen=True)
class Difference:
    """Paired difference over ``n`` seeds; no interval (None) where one seed cannot give one."""

    mean: float
    low: float | None = None
    high: float | None = None
    effect: float | None = None
    n: int | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """One arm's line of the table. ``kappa`` has the keys tokens, first_layer and all_layers."""

    n: int
    mean: float
    low: float | None = None
    high: float | None = None
    difference: Difference | None = None
    verdict: str | None = None
    kappa: Mapping[str, float] = dataclasses.field(default_factory=dict)
    relative_step_time: float | None = None


@dataclasses.dataclass(frozen=True)
class MeasuredRow:
    """A measurement and the run that it was made in."""

    arm: str
    seed: int
    row: Row


@dataclasses.dataclass(frozen=True)
class Spectra:
    """Singular values of one real sample at the site, before and after the correction (None: none made)."""

    before: Sequence[float]
    after: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """All that a report is made of. ``rows`` and ``spectra`` may be None: not written by this run."""

    path: Path
    title: str
    recipe: str
    command: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    metric: Metric
    versions: Mapping[str, Any]
    config: Mapping[str, Any]
    hypotheses: tuple[str, ...]
    machine: Any
    results: tuple[Result, ...]
    table: Mapping[str, Line]
    rows: tuple[MeasuredRow, ...] | None
    spectra: Mapping[str, Spectra] | None

    @property
    def baseline(self) -> Arm:
        """The arm called ``baseline``; without one, the first."""
        return next((arm for arm in self.arms if arm.name == "baseline"), self.arms[0])

    def results_of(self, arm: str) -> dict[int, Result]:
        """The finished runs of an arm by seed, in the order of the seeds."""
        found = {result.seed: result for result in self.results if result.arm == arm}
        return dict(sorted(found.items()))


def read_run(path: str | Path) -> RunFolder:
    """Read and check a run folder.

    Args:
        path: folder with ``run.json``, ``results.jsonl`` and ``summary.json``; ``rows.jsonl`` and
            ``spectra.json`` may be missing.

    Raises:
        FileNotFoundError: the folder or one of its three necessary files is missing.
        ValueError: a file is not what it should be; the message names file, line and field.

    >>> read_run("no/such/run")
    Traceback (most recent call last):
    FileNotFoundError: no/such/run is not a folder; `wellcond demo` and `wellcond compare` write run folders
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a folder; `wellcond demo` and `wellcond compare` write run folders"
        )
    run = _object(path / "run.json")
    where = str(path / "run.json")
    arms = tuple(_build(Arm, item, f"{where}, arms[{i}]") for i, item in enumerate(_list(run, "arms", where)))
    if not arms:
        raise ValueError(f"{where}: 'arms' is empty; a report needs at least one arm")
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: the names of the arms repeat: {names}")
    metric = _build(Metric, _field(run, "metric", where), f"{where}, metric")
    return RunFolder(
        path=path,
        title=str(run.get("title") or run.get("recipe") or path.name),
        recipe=str(run.get("recipe", "")),
        command=str(run.get("command", "")),
        arms=arms,
        seeds=tuple(run.get("seeds", ())),
        metric=metric,
        versions=run.get("versions") or {},
        config=run.get("config") or {},
        hypotheses=tuple(run.get("hypotheses") or ()),
        machine=run.get("machine"),
        results=_results(path / "results.jsonl", names, metric),
        table=_table(path / "summary.json", names),
        rows=read_rows(path / "rows.jsonl", names),
        spectra=_spectra(path / "spectra.json", names),
    )


def _results(path: Path, arms: Sequence[str], metric: Metric) -> tuple[Result, ...]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: no run of this folder has finished, nothing to report yet"
        )
    seen: dict[tuple[str, int], int] = {}
    results = []
    for number, item in _lines(path):
        where = f"{path}, line {number}"
        result = _build(Result, item, where)
        _known(result.arm, arms, where)
        if metric.name not in result.metrics:
            raise ValueError(f"{where}: metrics has no {metric.name!r}, only {sorted(result.metrics)}")
        for i, point in enumerate(result.curve):
            _field(point, "step", f"{where}, curve[{i}]")
        first = seen.setdefault((result.arm, result.seed), number)
        if first != number:
            raise ValueError(f"{where} repeats line {first}: arm {result.arm!r}, seed {result.seed}")
        results.append(result)
    if not results:
        raise ValueError(f"{path} is empty: no run of this folder has finished, nothing to report yet")
    return tuple(results)


def _table(path: Path, arms: Sequence[str]) -> dict[str, Line]:
    table = {}
    for name, item in _object(path).items():
        where = f"{path}, arm {name!r}"
        _known(name, arms, where)
        line = _build(Line, item, where)
        if line.difference is not None:
            difference = _build(Difference, line.difference, f"{where}, difference")
            line = dataclasses.replace(line, difference=difference)
        table[name] = line
    if not table:
        raise ValueError(f"{path} has no arm: nothing to report yet")
    return table


def read_rows(path: Path, arms: Sequence[str]) -> tuple[MeasuredRow, ...] | None:
    """The rows of ``rows.jsonl``; None where there is no such file. Raises as `read_run`."""
    if not path.is_file():
        return None
    names = {field.name for field in dataclasses.fields(Row)}
    seen: dict[tuple[Any, ...], int] = {}
    rows = []
    for number, item in _lines(path):
        where = f"{path}, line {number}"
        row = _build(Row, {name: item[name] for name in names & item.keys()}, where)
        arm, seed = _field(item, "arm", where), _field(item, "seed", where)
        _known(arm, arms, where)
        first = seen.setdefault((arm, seed, row.step, row.site, row.layer, row.head), number)
        if first != number:
            raise ValueError(
                f"{where} repeats line {first}: arm {arm!r}, seed {seed}, step {row.step}, {row.site}, "
                f"layer {row.layer}, head {row.head}; averages would count it twice"
            )
        rows.append(MeasuredRow(arm, seed, row))
    return tuple(rows)


def _spectra(path: Path, arms: Sequence[str]) -> dict[str, Spectra] | None:
    if not path.is_file():
        return None
    spectra = {}
    for name, item in _object(path).items():
        where = f"{path}, arm {name!r}"
        _known(name, arms, where)
        spectra[name] = _build(Spectra, item, where)
        for side in ("before", "after"):
            values = getattr(spectra[name], side)
            if values is not None and not all(isinstance(value, (int, float)) for value in values):
                raise ValueError(f"{where}: {side!r} must be a list of numbers, not {values!r}")
    return spectra


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; `wellcond demo` and `wellcond compare` write it: run the command again, "
            f"finished runs are kept"
        )
    try:
        value = decode(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line 1: an object is expected, not {type(value).__name__}")
    return value


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    numbered = list(enumerate(read_lines(path), start=1))
    for number, item in numbered:
        if not isinstance(item, dict):
            raise ValueError(f"{path}, line {number}: an object is expected, not {type(item).__name__}")
    return numbered


def _build(kind: Callable[..., T], item: Any, where: str) -> T:
    """A dataclass from a JSON object; missing, unknown and mistyped fields are named.

    Fields that this version does not know are let pass: a newer training floor may write more.
    """
    if not isinstance(item, Mapping):
        raise ValueError(f"{where}: an object is expected, not {item!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = _hints(kind)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in item
    ]
    if missing:
        raise ValueError(
            f"{where}: missing {', '.join(missing)}; found {', '.join(map(str, item)) or 'nothing'}"
        )
    for name in fields.keys() & item.keys():
        if not isinstance(item[name], hints[name]):
            wanted = " or ".join(sorted(kind.__name__ for kind in hints[name]))
            raise ValueError(f"{where}: {name!r} must be {wanted}, not {item[name]!r}")
    return kind(**{name: item[name] for name in fields.keys() & item.keys()})


def _hints(kind: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Per field of a dataclass the types that its JSON value may have."""

    def accepted(hint: Any) -> tuple[type, ...]:
        if isinstance(hint, types.UnionType):
            return tuple(kind for part in typing.get_args(hint) for kind in accepted(part))
        origin = typing.get_origin(hint) or hint
        if origin is float:
            return (float, int)
        if dataclasses.is_dataclass(origin) or issubclass(origin, Mapping):
            return (dict,)
        return (list,) if issubclass(origin, Sequence) and origin is not str else (origin,)

    return {name: accepted(hint) for name, hint in typing.get_type_hints(kind).items()}


def _known(arm: Any, arms: Sequence[str], where: str) -> None:
    if arm not in arms:
        raise ValueError(f"{where}: arm {arm!r} is not in run.json, which has {', '.join(arms)}")


def _field(item: Any, name: str, where: str) -> Any:
    if not isinstance(item, Mapping) or name not in item:
        _missing(item, name, where)
    return item[name]


def _list(item: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = _field(item, name, where)
    if not isinstance(value, list):
        raise ValueError(f"{where}: {name!r} must be a list, not {value!r}")
    return value


def _missing(item: Any, name: str, where: str) -> NoReturn:
    found = ", ".join(map(str, item)) if isinstance(item, Mapping) else repr(item)
    raise ValueError(f"{where}: missing {name!r}; found {found or 'nothing'}")
