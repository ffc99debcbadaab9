"""What detectors find is drawn where it is, arm by arm, and a file that is wrong is said to be."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tests.report.synthetic import write_run
from wellcond.report import read_run, write_report
from wellcond.report.detections import Shown, detection_plots, detections_figure, read_examples
from wellcond.report.style import DARK, LIGHT
from wellcond.tasks.detection import as_png, compressed

SIZE = (48, 64)


def found(box: tuple[int, int, int, int], name: str = "7", score: float | None = None) -> dict[str, Any]:
    """An object whose mask is its box."""
    left, top, right, bottom = box
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, top:bottom, left:right] = True
    (run,) = compressed(mask)
    entry = {
        "name": name,
        "box": list(box),
        "mask": {"size": list(SIZE), "counts": run["counts"].decode("ascii")},
    }
    return entry if score is None else entry | {"score": score}


def examples(arms: list[str]) -> dict[str, Any]:
    image = as_png(torch.full((1, *SIZE), 0.25))
    there = [found((0, 0, 12, 20)), found((30, 20, 50, 44), "3")]
    return {
        arm: [
            {
                "image": image,
                "there": there,
                "found": [found((2, 1, 14, 20), score=0.91)] if arm != arms[0] else [],
            },
            {"image": image, "there": there[1:], "found": [found((31, 21, 50, 44), "3", 0.5)]},
        ]
        for arm in arms
    }


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path)
    arms = [arm.name for arm in read_run(folder).arms]
    (folder / "examples.json").write_text(json.dumps(examples(arms)))
    return folder


def test_a_figure_for_each_image_says_what_was_found(run_folder: Path) -> None:
    run = read_run(run_folder)
    first, second = detection_plots(run)
    assert first.caption.startswith("Test image 1: 2 objects there; found with a score of a half or more: ")
    assert f"{run.arms[0].name} 0, {run.arms[1].name} 1" in first.caption
    assert second.caption.startswith("Test image 2: 1 object there;")
    assert f"{run.arms[0].name} found nothing" in first.alt


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_all_arms_are_side_by_side_and_labels_inside_the_figure(run_folder: Path, theme: Any) -> None:
    run = read_run(run_folder)
    names = [arm.name for arm in run.arms]
    read = read_examples(run_folder / "examples.json", names)
    figure = detections_figure({arm: images[0] for arm, images in read.items()}, run.baseline.name, theme)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["there", *names]
    assert [len(axes.patches) for axes in figure.axes] == [2, *(int(name != names[0]) for name in names)]
    for axes in figure.axes:
        for label in axes.texts:
            outline = label.get_window_extent(canvas.get_renderer())
            assert outline.y1 <= axes.get_window_extent().y1 + 2, f"{label.get_text()} is cut off"
    overlay = figure.axes[0].images[1].get_array()
    assert overlay is not None
    assert np.array_equal(overlay[..., 3] > 0, np.pad(np.ones((20, 12), bool), ((0, 28), (0, 52))))


def test_the_page_has_them(run_folder: Path) -> None:
    page = write_report(run_folder).read_text()
    assert "What is found" in page
    assert (run_folder / "plots" / "detections-1.png").is_file()


def test_without_masks_there_are_boxes(run_folder: Path) -> None:
    content = json.loads((run_folder / "examples.json").read_text())
    for images in content.values():
        for image in images:
            for entry in (*image["found"], *image["there"]):
                del entry["mask"]
    (run_folder / "examples.json").write_text(json.dumps(content))
    read = read_examples(run_folder / "examples.json", list(content))
    assert next(iter(read.values()))[0].there[0] == Shown("7", (0, 0, 12, 20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, a: c.update(unheard=c[a]), "has examples of \\['unheard'\\]"),
        (lambda c, a: c[a][1].pop("image"), "different images"),
        (lambda c, a: c[a][0]["found"][0].pop("box"), "image 1: missing or mistyped field 'box'"),
        (lambda c, a: c[a][0]["found"][0]["mask"].update(size=[4, 4]), "does not fit an image"),
    ],
)
def test_a_wrong_file_is_refused(run_folder: Path, change: Any, message: str) -> None:
    content = json.loads((run_folder / "examples.json").read_text())
    arms = list(content)
    change(content, arms[1])
    (run_folder / "examples.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_examples(run_folder / "examples.json", arms)
    (run_folder / "examples.json").write_text("{")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_examples(run_folder / "examples.json", arms)
