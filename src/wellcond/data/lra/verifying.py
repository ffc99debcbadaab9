"""Every generated sample looked at again, by other means than those that made it."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import numpy as np

from wellcond.data.lra.listops import IDS, Grammar
from wellcond.data.lra.listops_files import HEADER
from wellcond.data.lra.pathfinder import Scene, path_numbers, trace


def verify_listops(folder: Path) -> str:
    """Checks the three files of a folder; a sentence with what was found.

    Each expression is translated to Python and computed there; length and depth are counted; none may be there twice.

    Raises ValueError at the first line that is wrong.
    """
    settings = json.loads((folder / "listops.json").read_text(encoding="utf-8"))
    grammar = Grammar(**settings["grammar"])
    answers: collections.Counter[int] = collections.Counter()
    seen: set[str] = set()
    for name, count in settings["counts"].items():
        path = folder / f"basic_{name}.tsv"
        header, *lines = path.read_text(encoding="ascii").splitlines()
        if header != HEADER or len(lines) != count:
            raise ValueError(f"{path} has {len(lines)} expressions under {header!r}, expected {count}")
        for number, line in enumerate(lines, 2):
            source, answer = line.split("\t")
            tokens = source.split()
            depth = nesting(tokens)
            if not grammar.min_length < len(tokens) < grammar.max_length or depth > grammar.max_depth:
                raise ValueError(
                    f"{path}, line {number}: {len(tokens)} tokens, depth {depth}, outside of {grammar}"
                )
            if (found := by_python(source)) != int(answer):
                raise ValueError(f"{path}, line {number}: the answer is {found}, not {answer}")
            if source in seen:
                raise ValueError(f"{path}, line {number}: this expression was there before")
            seen.add(source)
            answers[int(answer)] += 1
    shares = ", ".join(f"{digit}: {answers[digit] / len(seen):.1%}" for digit in range(10))
    return f"{len(seen)} expressions of ListOps are right; answers {shares}"


def by_python(source: str) -> int:
    """The value of an expression as Python computes it from nested calls.

    >>> by_python("[MED 1 [SM 9 9 ] 3 4 ]")
    3
    """
    words = {"[MIN": "min((", "[MAX": "max((", "[MED": "med((", "[SM": "sm((", "]": ")),"}
    known = {"min": min, "max": max, "med": lambda v: int(np.median(v)), "sm": lambda v: sum(v) % 10}
    code = " ".join(words.get(token, f"{token},") for token in source.split())
    if not set(source.split()) <= set(IDS):
        raise ValueError(f"{source[:80]!r} holds other words than ListOps")
    return int(eval(code.removesuffix(","), {"__builtins__": {}}, known))


def nesting(tokens: list[str]) -> int:
    """The depth of the tree, the root counted as 1.

    >>> nesting("[MAX 1 [MIN 2 9 ] 3 ]".split()), nesting(["7"])
    (3, 1)
    """
    depth = deepest = 0
    for token in tokens:
        depth += token.startswith("[")
        deepest = max(deepest, depth + token.isdecimal())
        depth -= token == "]"
    return deepest


def verify_pathfinder(folder: Path) -> str:
    """Checks the three files of a folder; a sentence with what was found.

    Each label is read off the pixels by walking from marker to marker; there must be two paths and at most as
    many more as distractors were asked for; no image may be there twice.

    Raises ValueError at the first image that is wrong.
    """
    settings = json.loads((folder / "pathfinder.json").read_text(encoding="utf-8"))
    scene = Scene(**settings["scene"])
    seen: set[bytes] = set()
    joined = paths = 0
    for name, count in settings["counts"].items():
        path = folder / f"{name}.npz"
        with np.load(path) as arrays:
            images, labels = arrays["images"], arrays["labels"]
        if images.shape != (count, scene.size, scene.size) or labels.shape != (count,):
            raise ValueError(f"{path} has images {images.shape} and labels {labels.shape}, expected {count}")
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            if (found := trace(image)) != label:
                raise ValueError(f"{path}, image {i}: the walk says {found}, the label {label}")
            number = int(path_numbers(image).max())
            if not 2 <= number <= 2 + scene.distractors:
                raise ValueError(
                    f"{path}, image {i}: {number} paths, expected 2 and up to {scene.distractors} more"
                )
            if image.tobytes() in seen:
                raise ValueError(f"{path}, image {i} was there before")
            seen.add(image.tobytes())
            joined += int(label)
            paths += number
    total = len(seen)
    return (
        f"{total} images of Pathfinder are right; {joined / total:.1%} have the markers on one path; "
        f"{paths / total - 2:.2f} distractors on average"
    )
