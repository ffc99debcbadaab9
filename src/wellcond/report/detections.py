"""What trained detectors find, drawn on images: all arms side by side, beside what is there."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from wellcond.report.folder import RunFolder
from wellcond.report.kappas import Array
from wellcond.report.plots import Plot
from wellcond.report.style import Theme, marks

COLUMNS = 3
ROOM = 0.1
"""The share of an image's height that a label needs above its box."""

THERE, DARK_TEXT = "#e8c33c", "#1d2430"
"""Of what is there: a colour that no arm has, seen on dark images and bright ones alike, and its text."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """One object: its class, box as left, top, right, bottom, score (None: it is really there) and mask ``(H, W)``."""

    name: str
    box: tuple[float, float, float, float]
    score: float | None = None
    mask: Array | None = None


@dataclasses.dataclass(frozen=True)
class Example:
    """One test image, ``(H, W)`` or ``(H, W, 3)`` from 0 to 1, what one arm found in it and what is there."""

    image: Array
    found: tuple[Shown, ...]
    there: tuple[Shown, ...]


def detection_plots(run: RunFolder) -> Iterator[Plot]:
    """A figure for each test image of ``examples.json``; none where the run has no such file.

    Raises:
        ValueError: the file is not what it should be; the message names it, the arm and the image.
    """
    path = run.path / "examples.json"
    if not path.is_file():
        return
    examples = read_examples(path, [arm.name for arm in run.arms])
    for index in range(len(next(iter(examples.values())))):
        of_arms = {arm: found[index] for arm, found in examples.items()}
        there = next(iter(of_arms.values())).there
        counts = ", ".join(f"{arm} {len(example.found)}" for arm, example in of_arms.items())
        yield Plot(
            f"detections {index + 1}",
            f"Test image {index + 1}: {_counted(there)} there; found with a score of a half or more: {counts}.",
            f"objects drawn on test image {index + 1}: {_names(there)} there; "
            + "; ".join(f"{arm} found {_names(example.found)}" for arm, example in of_arms.items()),
            partial(detections_figure, of_arms, run.baseline.name),
        )


def detections_figure(examples: Mapping[str, Example], baseline: str, theme: Theme) -> Figure:
    """One image again and again: with what is there, then with what each arm found.

    Args:
        examples: of the same image, by arm.
        baseline: the arm whose colour is grey in every figure.
        theme: `LIGHT` or `DARK`.
    """
    first = next(iter(examples.values()))
    look = marks(list(examples), baseline, theme)
    panels = [("there", THERE, DARK_TEXT, first.there)]
    panels += [(arm, look[arm].colour, theme.paper, example.found) for arm, example in examples.items()]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height, width = first.image.shape[:2]
    edge = 5.9 / columns
    figure = Figure(
        figsize=(5.9, rows * (edge * min(1.6, height / width) + 0.3)),
        dpi=200,
        layout="constrained",
        facecolor=theme.paper,
    )
    for place, (title, colour, text, objects) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(title, loc="left", color=theme.ink, fontsize=10, fontweight="bold")
        axes.imshow(first.image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        for shown in objects:
            _draw(axes, shown, colour, text)
    return figure


def _draw(axes: Axes, shown: Shown, colour: str, text: str) -> None:
    left, top, right, bottom = shown.box
    if shown.mask is not None:
        overlay = np.zeros((*shown.mask.shape, 4))
        overlay[..., :3] = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        overlay[..., 3] = 0.45 * shown.mask
        axes.imshow(overlay, interpolation="nearest")
    # Pixels are drawn around whole numbers, a box goes along their edges.
    axes.add_patch(
        Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=colour, lw=1.4)
    )
    height = axes.images[0].get_size()[0]
    axes.text(
        left - 0.5,
        top - 0.5,
        shown.name if shown.score is None else f"{shown.name} {shown.score:.2f}",
        color=text,
        fontsize=6.5,
        va="bottom" if top >= ROOM * height else "top",  # above the box, or inside it where there is no room
        clip_on=True,
        bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
    )


def read_examples(path: Path, arms: Sequence[str]) -> dict[str, list[Example]]:
    """The examples of each arm that has some, in the order of ``arms``; the same images for all.

    Raises:
        ValueError: not JSON, an unknown arm, a missing field, an image that cannot be decoded, or images that differ.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno} is not JSON: {error}") from error
    unknown = sorted(set(content) - set(arms))
    if unknown or not content:
        raise ValueError(f"{path} has examples of {unknown or 'no arm'}; run.json has {', '.join(arms)}")
    images = [[entry.get("image") for entry in content[arm]] for arm in arms if arm in content]
    if any(other != images[0] for other in images):
        raise ValueError(f"{path}: arms have examples of different images, so that none can be compared")
    return {
        arm: [
            _example(entry, f"{path}, arm {arm!r}, image {i}")
            for i, entry in enumerate(content[arm], start=1)
        ]
        for arm in arms
        if arm in content
    }


def _example(entry: Mapping[str, Any], where: str) -> Example:
    try:
        image = imread(io.BytesIO(base64.b64decode(entry["image"], validate=True)))
        found, there = (tuple(_shown(o, image.shape[:2]) for o in entry[key]) for key in ("found", "there"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: missing or mistyped field {error}") from error
    except (binascii.Error, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return Example(image, found, there)


def _shown(entry: Mapping[str, Any], size: tuple[int, int]) -> Shown:
    mask = None
    if "mask" in entry:
        from faster_coco_eval.core import mask as runs

        runs_of_it = entry["mask"]
        if tuple(runs_of_it["size"]) != size:
            raise ValueError(f"a mask of size {runs_of_it['size']} does not fit an image of {size}")
        mask = runs.decode({"size": list(size), "counts": runs_of_it["counts"].encode("ascii")})
    left, top, right, bottom = map(float, entry["box"])
    return Shown(str(entry["name"]), (left, top, right, bottom), entry.get("score"), mask)


def _counted(objects: Sequence[Shown]) -> str:
    return "1 object" if len(objects) == 1 else f"{len(objects)} objects"


def _names(objects: Sequence[Shown]) -> str:
    return ", ".join(shown.name for shown in objects) or "nothing"
