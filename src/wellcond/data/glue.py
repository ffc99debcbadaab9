"""GLUE's eight tasks, from the official TSV files in a local folder or from the Hugging Face hub.

Source: Wang et al., arXiv 1804.07461. WNLI is left out, as BERT, Cramming and the paper do. Labels of the official test
sets are not public, so scores are those of the validation ("dev") sets.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellcond.data.folder import Corrupt
from wellcond.data.sentences import Example

HUB = "nyu-mll/glue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlueTask:
    """How one task is written down, and what it is scored by.

    Attributes:
        name: on the hub, and in names of recipes.
        title: for people, and the name of the official folder.
        sentences: columns of the sentences, on the hub.
        columns: columns of the sentences and of the label in the official files: their names in the first line, or
            places where there is no such line.
        classes: names of the labels in the order of their numbers on the hub; empty for a regression.
        written: how the official files write the classes; None: as ``classes``.
        metrics: names of the scores, see `wellcond.tasks.glue`; the first is the one that tables show.
        parts: validation sets: name and official file.
    """

    name: str
    title: str
    sentences: tuple[str, ...]
    columns: tuple[str | int, ...]
    classes: tuple[str, ...]
    written: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ("accuracy",)
    parts: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"validation": "dev.tsv"})

    @property
    def regression(self) -> bool:
        """Whether labels are numbers."""
        return not self.classes


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")

GLUE = {
    task.name: task
    for task in (
        GlueTask(
            name="mnli",
            title="MNLI",
            sentences=("premise", "hypothesis"),
            columns=("sentence1", "sentence2", "gold_label"),
            classes=("entailment", "neutral", "contradiction"),
            parts={"validation_matched": "dev_matched.tsv", "validation_mismatched": "dev_mismatched.tsv"},
        ),
        GlueTask(
            name="sst2",
            title="SST-2",
            sentences=("sentence",),
            columns=("sentence", "label"),
            classes=("negative", "positive"),
            written=BINARY,
        ),
        GlueTask(
            name="rte",
            title="RTE",
            sentences=("sentence1", "sentence2"),
            columns=("sentence1", "sentence2", "label"),
            classes=ENTAILMENT,
        ),
        GlueTask(
            name="qnli",
            title="QNLI",
            sentences=("question", "sentence"),
            columns=("question", "sentence", "label"),
            classes=ENTAILMENT,
        ),
        GlueTask(
            name="qqp",
            title="QQP",
            sentences=("question1", "question2"),
            columns=("question1", "question2", "is_duplicate"),
            classes=("not_duplicate", "duplicate"),
            written=BINARY,
            metrics=("f1", "accuracy"),
        ),
        GlueTask(
            name="mrpc",
            title="MRPC",
            sentences=("sentence1", "sentence2"),
            columns=("#1 String", "#2 String", "Quality"),
            classes=("not_equivalent", "equivalent"),
            written=BINARY,
            metrics=("f1", "accuracy"),
        ),
        GlueTask(
            name="cola",
            title="CoLA",
            sentences=("sentence",),
            columns=(3, 1),
            classes=("unacceptable", "acceptable"),
            written=BINARY,
            metrics=("matthews", "accuracy"),
        ),
        GlueTask(
            name="stsb",
            title="STS-B",
            sentences=("sentence1", "sentence2"),
            columns=("sentence1", "sentence2", "score"),
            classes=(),
            metrics=("spearman", "pearson"),
        ),
    )
}
"""The tasks in the paper's order; STS-B, which its table does not show, comes last."""


@dataclasses.dataclass(frozen=True)
class GlueData:
    """Examples of one task.

    Attributes:
        train: to train on.
        validation: to score on; MNLI has two.
    """

    train: Sequence[Example]
    validation: Mapping[str, Sequence[Example]]


def glue_folder(task: GlueTask, folder: str | os.PathLike[str], *, corrupt: Corrupt = "fatal") -> GlueData:
    """A task from the official files, ``FOLDER/TITLE/train.tsv`` and ``dev.tsv``, as gluebenchmark.com gives them.

    Args:
        task: one of `GLUE`.
        folder: that holds the tasks' folders, or the task's folder itself.
        corrupt: what to do about a *training* line that cannot be read; ``"skip"`` counts them in a warning. The
            published QQP has such lines. A validation line is always fatal.

    Raises:
        FileNotFoundError: a file is missing; the message says what it should hold.
        ValueError: a file has no such column, or a line has no such label; the message names file and line.
    """
    root = Path(folder)
    place = root / task.title if (root / task.title).is_dir() else root
    train = _read(task, place / "train.tsv", corrupt)
    return GlueData(train, {name: _read(task, place / file, "fatal") for name, file in task.parts.items()})


def _read(task: GlueTask, path: Path, corrupt: Corrupt) -> list[Example]:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: the folder should hold {task.title}/train.tsv and "
            f"{', '.join(f'{task.title}/{file}' for file in task.parts.values())} of gluebenchmark.com"
        )
    found, broken = [], []
    for number, fields in _lines(task, path):
        try:
            found.append(_example(task, fields))
        except (IndexError, ValueError) as error:
            message = f"{path}, line {number}: {error}"
            if corrupt == "fatal":
                raise ValueError(
                    f"{message}. Mend or delete the line, or leave such training lines out by --corrupt skip"
                ) from error
            broken.append(message)
    if broken:
        warnings.warn(f"{len(broken)} lines left out, the first: {broken[0]}", stacklevel=3)
    if not found:
        raise ValueError(f"{path} has no example")
    return found


def _lines(task: GlueTask, path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of each line and its sentences and label; a line that is too short has fewer."""
    # Not splitlines, nor Python's reading of lines: sentences contain characters that these take for the end of a line.
    # Quotes mean nothing in these files.
    lines = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    places: list[int] = []
    start = 0
    if isinstance(task.columns[0], str):
        names = lines[0].split("\t") if lines else []
        missing = [str(name) for name in task.columns if name not in names]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; its first line has {names}")
        places, start = [names.index(str(name)) for name in task.columns], 1
    else:
        places = [int(place) for place in task.columns]
    for number, line in enumerate(lines[start:], start + 1):
        fields = line.split("\t")
        yield number, [fields[place] for place in places if place < len(fields)]


def _example(task: GlueTask, fields: list[str]) -> Example:
    """Raises IndexError or ValueError for fields that are none."""
    if len(fields) < len(task.columns):
        raise IndexError(f"it has only {len(fields)} of the {len(task.columns)} columns that are read")
    *texts, label = fields
    second = texts[1] if len(texts) > 1 else None
    if task.regression:
        return Example(texts[0], second, _score(label))
    known = task.written or task.classes
    if label not in known:
        raise ValueError(f"label {label!r} is none of {', '.join(known)}")
    return Example(texts[0], second, known.index(label))


def _score(label: str) -> float:
    value = float(label)
    if not 0 <= value <= 5:
        raise ValueError(f"score {label!r} is outside 0 to 5")
    return value


def glue_hub(task: GlueTask) -> GlueData:
    """A task from ``nyu-mll/glue`` on the Hugging Face hub, or from its cache.

    Raises:
        ConnectionError: the hub is out of reach and its cache does not hold the task.
    """
    import datasets

    try:
        parts = datasets.load_dataset(HUB, task.name)
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ConnectionError(
            f"GLUE's {task.title} could not be had from the Hugging Face hub ({type(error).__name__}: {error}); put "
            f"the official files of gluebenchmark.com into a folder and name it by --data-dir"
        ) from error
    return from_datasets(task, parts)


def from_datasets(task: GlueTask, parts: Mapping[str, Any]) -> GlueData:
    """A task from a ``datasets.DatasetDict`` with GLUE's columns on the hub."""

    def examples(part: Any) -> list[Example]:
        second = part[task.sentences[1]] if len(task.sentences) > 1 else [None] * len(part)
        return [
            Example(first, other, label)
            for first, other, label in zip(part[task.sentences[0]], second, part["label"], strict=True)
        ]

    return GlueData(examples(parts["train"]), {name: examples(parts[name]) for name in task.parts})
