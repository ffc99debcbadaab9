"""Pathfinder: labels that a walk over the pixels confirms, and files that do not depend on how they were made."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PngImage

from wellcond.data.lra import generating
from wellcond.data.lra.__main__ import main
from wellcond.data.lra.pathfinder import MARKER_VALUE, STEP, Drawing, Scene, draw, path_numbers, trace
from wellcond.data.lra.pathfinder_files import (
    OFFICIAL,
    Counts,
    drawing,
    pathfinder,
    read_pathfinder,
    write_pathfinder,
)
from wellcond.data.lra.verifying import verify_pathfinder

SMALL = Scene(size=16, dashes=3, distractors=2, distractor_dashes=2, seed_distance=4, marker_radius=0.75)
FEW = Counts(train=5, val=2, test=3)


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    return [drawing(Scene(), 0, index) for index in range(24)]


def walk(image: np.ndarray, start: tuple[int, int]) -> set[tuple[int, int]]:
    """Lit pixels within reach of steps of at most two pixels in both directions, by a plain search."""
    reached, waiting = {start}, [start]
    while waiting:
        row, column = waiting.pop()
        for r, c in itertools.product(range(row - 2, row + 3), range(column - 2, column + 3)):
            inside = 0 <= r < image.shape[0] and 0 <= c < image.shape[1]
            if inside and image[r, c] > 0 and (r, c) not in reached:
                reached.add((r, c))
                waiting.append((r, c))
    return reached


def test_labels_are_what_a_plain_search_finds(drawings: list[Drawing]) -> None:
    assert {one.label for one in drawings} == {0, 1}
    for one in drawings:
        markers = [tuple(place) for place in np.argwhere(one.image == MARKER_VALUE)]
        reached = walk(one.image, markers[0])
        near = [m for m in markers if max(abs(m[0] - markers[0][0]), abs(m[1] - markers[0][1])) <= 3]
        other = [m for m in markers if m not in near]
        assert len(near) in range(4, 13)
        assert len(other) in range(4, 13)
        assert all(m in reached for m in near)
        assert all((m in reached) == bool(one.label) for m in other)
        assert trace(one.image) == one.label


def test_each_path_is_one_walk_and_keeps_its_distance(drawings: list[Drawing]) -> None:
    for one in drawings:
        assert path_numbers(one.image).max() == len(one.paths)
        for cells in one.paths:
            assert len(set(path_numbers(one.image)[cells])) == 1
        for a, b in itertools.combinations(one.paths, 2):
            apart = np.abs(np.argwhere(a)[:, None] - np.argwhere(b)[None]).max(-1).min()
            assert apart > STEP


def test_paths_are_dashed(drawings: list[Drawing]) -> None:
    """Pixels that touch make a dash; a long path has as many as the scene says."""
    from scipy.ndimage import label

    for one in drawings:
        for cells, dashes in zip(one.paths, [14, 14, *[4] * 5], strict=False):
            assert label(cells, structure=np.ones((3, 3)))[1] == dashes


def test_the_border_is_black(drawings: list[Drawing]) -> None:
    for one in drawings:
        edges = (one.image[0], one.image[-1], one.image[:, 0], one.image[:, -1])
        assert not any(edge.any() for edge in edges)


def test_the_answer_needs_the_whole_path(drawings: list[Drawing]) -> None:
    """Cut one dash out of the marked path, and the walk no longer arrives."""
    from scipy.ndimage import label

    for one in drawings:
        if not one.label:
            continue
        marked = one.image == MARKER_VALUE
        path = next(cells for cells in one.paths if (cells & marked).any())
        dashes, count = label(path, structure=np.ones((3, 3)))
        inner = [n for n in range(1, count + 1) if not (marked & (dashes == n)).any()]
        image = one.image.copy()
        image[dashes == inner[len(inner) // 2]] = 0
        assert trace(image) == 0


def test_turning_and_mirroring_keep_the_answer(drawings: list[Drawing]) -> None:
    for one in drawings[:4]:
        for quarter in range(4):
            turned = np.rot90(one.image, quarter)
            assert trace(turned) == trace(turned[:, ::-1]) == one.label


def test_without_two_markers_there_is_no_question() -> None:
    with pytest.raises(ValueError, match="0 markers, not 2"):
        trace(np.zeros((8, 8), np.uint8))


@pytest.mark.parametrize(
    "impossible",
    [{"size": 20}, {"padding": 0}, {"dashes": 1}, {"continuity": 0.5}, {"marker_radius": 0.5}, {"dash": 1.0}],
)
def test_scenes_that_cannot_be_drawn_are_refused(impossible: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(impossible.values())))):
        Scene(**impossible)  # type: ignore[arg-type]


def test_the_same_seed_draws_the_same_image() -> None:
    first, again, other = (draw(SMALL, random.Random(seed)).image for seed in (7, 7, 8))
    assert (first == again).all()
    assert (first != other).any()


def test_eight_positions_of_each_training_image() -> None:
    split = pathfinder(SMALL, train=3, test=2)
    ids = [split.train[i]["input_ids"].reshape(16, 16).numpy() for i in range(24)]
    labels = [int(split.train[i]["labels"]) for i in range(24)]
    assert (len(split.train), len(split.test)) == (24, 2)  # type: ignore[arg-type]
    assert len({one.tobytes() for one in ids}) == 24
    assert all(trace((one - 1).astype(np.uint8)) == label for one, label in zip(ids, labels, strict=True))


# --------------------------------------------------------------------------------------------- files


def arrays(folder: Path) -> dict[str, list[np.ndarray]]:
    return {
        name: [np.load(folder / f"{name}.npz")[key] for key in ("images", "labels")]
        for name in ("train", "val", "test")
    }


def test_an_interruption_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "PART_SIZE", 4)
    write_pathfinder(tmp_path / "once", scene=SMALL, counts=FEW)
    written, calls = generating._written, []

    def interrupted(write: generating.WritePart, part: range, path: Path) -> int:
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(part)
        return written(write, part, path)

    monkeypatch.setattr(generating, "_written", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_pathfinder(tmp_path / "twice", scene=SMALL, counts=FEW)
    monkeypatch.setattr(generating, "_written", written)
    write_pathfinder(tmp_path / "twice", scene=SMALL, counts=FEW)
    once, twice = arrays(tmp_path / "once"), arrays(tmp_path / "twice")
    assert {name: [part.shape for part in parts] for name, parts in once.items()} == {
        "train": [(5, 16, 16), (5,)],
        "val": [(2, 16, 16), (2,)],
        "test": [(3, 16, 16), (3,)],
    }
    for name in once:
        for one, other in zip(once[name], twice[name], strict=True):
            assert (one == other).all()
    assert not list(tmp_path.rglob("*writing"))
    assert verify_pathfinder(tmp_path / "twice").startswith("10 images of Pathfinder are right")
    with pytest.raises(ValueError, match="made with other settings"):
        write_pathfinder(tmp_path / "once", scene=SMALL, counts=FEW, seed=1)


@pytest.mark.parametrize("injected", ["label", "twice", "number"])
def test_the_verifier_finds_what_is_wrong(injected: str, tmp_path: Path) -> None:
    write_pathfinder(tmp_path, scene=SMALL, counts=FEW)
    images, labels = arrays(tmp_path)["train"]
    if injected == "label":
        labels[3] = 1 - labels[3]
    elif injected == "twice":
        images[2], labels[2] = images[4], labels[4]
    else:
        images, labels = images[:4], labels[:4]
    np.savez_compressed(tmp_path / "train.npz", images=images, labels=labels)
    with pytest.raises(ValueError, match=r"image 3: the walk says|image 4 was there before|expected 5"):
        verify_pathfinder(tmp_path)


def test_reading(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Generate it: python -m wellcond.data.lra pathfinder"):
        read_pathfinder(tmp_path, size=16)
    write_pathfinder(tmp_path, scene=SMALL, counts=FEW)
    split = read_pathfinder(tmp_path, size=16)
    images, labels = arrays(tmp_path)["test"]
    assert split.test[1]["input_ids"].tolist() == (images[1].reshape(-1).astype(int) + 1).tolist()
    assert split.test[1]["labels"] == labels[1]
    with pytest.raises(ValueError, match="model reads 32×32"):
        read_pathfinder(tmp_path, size=32)
    (tmp_path / "test.npz").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"test.npz holds no images"):
        read_pathfinder(tmp_path, size=16)


def write_official(folder: Path, images: list[np.ndarray]) -> None:
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    lines = []
    for i, image in enumerate(images):
        PngImage.fromarray(image).save(folder / "imgs" / "0" / f"sample_{i}.png")
        lines.append(f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")


def test_the_official_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (32, 32)).astype(np.uint8) for _ in range(20)]
    root = tmp_path / OFFICIAL
    write_official(root, images)
    split = read_pathfinder(tmp_path, size=32)
    assert (len(split.train), len(split.test)) == (16, 2)  # type: ignore[arg-type]
    known = {(image.reshape(-1).astype(int) + 1).tobytes(): i % 2 for i, image in enumerate(images)}
    for part in (split.train, split.test):
        for i in range(len(part)):  # type: ignore[arg-type]
            assert known[part[i]["input_ids"].numpy().tobytes()] == int(part[i]["labels"])
    (root / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="1 of 20 images .* are empty files"):
        assert len(read_pathfinder(root, size=32).train) == 15  # type: ignore[arg-type]
    (root / "imgs" / "0" / "sample_3.png").unlink()
    with pytest.raises(ValueError, match=r"sample_3.png, named by .*0.npy, is missing or no image"):
        read_pathfinder(root, size=32)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--train", "2", "--val", "1", "--test", "1", "--workers", "1"]
    assert main(["pathfinder", str(tmp_path), *counts]) == 0
    assert main(["verify", str(tmp_path)]) == 0
    assert "4 images of Pathfinder are right" in capsys.readouterr().out


@pytest.mark.slow
def test_a_thousand_images_of_the_published_size(tmp_path: Path) -> None:
    write_pathfinder(tmp_path, counts=Counts(800, 100, 100))
    assert verify_pathfinder(tmp_path).startswith("1000 images of Pathfinder are right")
