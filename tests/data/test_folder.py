import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.folders import write_image_folder
from wellcond.data import CorruptImage, image_folder
from wellcond.data.folder import Corrupt


def small(image: Any) -> Tensor:
    from torchvision.transforms.functional import to_tensor

    return to_tensor(image)


def load(root: Path, corrupt: Corrupt = "fatal") -> Any:
    return image_folder(root, small, small, corrupt)


def test_images_and_labels_come_from_class_folders(tmp_path: Path) -> None:
    split, classes = load(write_image_folder(tmp_path, train=4, val=2))
    assert classes == ["ant", "bee", "cat"]
    assert [split.train[i]["labels"].item() for i in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert len(split.test) == 6
    item = split.test[5]
    assert item["pixel_values"].shape == (3, 32, 40)
    assert item["pixel_values"].mean((1, 2)).argmax() == item["labels"] == 2


def test_nested_folders_belong_to_their_class(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "train/bee/more").mkdir()
    (tmp_path / "train/bee/0.jpg").rename(tmp_path / "train/bee/more/0.jpg")
    split, _ = load(tmp_path)
    assert [path.name for path, label in split.train.samples if label == 1].count("0.jpg") == 1


def test_a_grey_image_and_one_with_a_palette_are_made_rgb(tmp_path: Path) -> None:
    from PIL import Image

    write_image_folder(tmp_path)
    for index, mode in enumerate(("L", "P", "RGBA", "CMYK")):
        ending = "jpg" if mode == "CMYK" else "png"
        Image.new(mode, (9, 9)).save(tmp_path / f"train/ant/z{index}.{ending}")
    split, _ = load(tmp_path)
    shapes = {tuple(split.train[i]["pixel_values"].shape) for i in range(len(split.train))}
    assert shapes == {(3, 32, 40), (3, 9, 9)}


def flatten_val(root: Path) -> None:
    for folder in list((root / "val").iterdir()):
        for path in folder.iterdir():
            path.rename(root / "val" / f"{folder.name}{path.name}")
        folder.rmdir()


def number_classes(root: Path) -> None:
    for part in ("train", "val"):
        for old, new in (("ant", "1"), ("bee", "10"), ("cat", "2")):
            (root / part / old).rename(root / part / new)


def empty(root: Path) -> None:
    shutil.rmtree(root / "train/bee")
    (root / "train/bee").mkdir()
    (root / "train/bee/readme.txt").touch()


def no_images(root: Path) -> None:
    for path in root.rglob("*.jpg"):
        path.rename(path.with_suffix(".txt"))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (flatten_val, r"val holds 6 images directly .* no class folder.*Move each into .*val/CLASS/"),
        (number_classes, r"sort as 1, 10, 2, \.\.\..*Rename them in train and val to 2 digits.*printf"),
        (empty, r"train: no images in bee.*remove these classes from train and val"),
        (no_images, r"train holds no images; known endings are .jpg"),
        (lambda root: shutil.rmtree(root / "val/cat"), r"classes differ: cat only in .*train"),
        (
            lambda root: (root / "val/cat").rename(root / "val/cats"),
            r"cat only in .*train; cats only in .*val",
        ),
        (lambda root: shutil.rmtree(root / "val"), r"no folder val or validation \(it holds train\)"),
        (lambda root: shutil.rmtree(root / "train"), r"no folder train .*the folder above both"),
        (lambda root: shutil.copytree(root / "val", root / "validation"), r"holds both val and validation"),
        (
            lambda root: (root / "train/ant/0.jpg").rename(root / "train/0.jpg"),
            r"train holds 1 images directly \(0.jpg, ...\) beside 3 class folders",
        ),
    ],
)
def test_a_wrong_layout_is_refused_with_the_mend(tmp_path: Path, spoil: Any, complaint: str) -> None:
    spoil(write_image_folder(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        load(tmp_path)


def test_numbers_that_sort_as_numbers_are_accepted(tmp_path: Path) -> None:
    _, classes = load(write_image_folder(tmp_path, classes=("01", "02", "10")))
    assert classes == ["01", "02", "10"]


def test_the_rename_in_the_message_mends_the_folders(tmp_path: Path) -> None:
    import re
    import subprocess

    number_classes(write_image_folder(tmp_path))
    with pytest.raises(ValueError) as error:
        load(tmp_path)
    command = re.search(r"for d in .*done", str(error.value))
    assert command is not None
    for part in ("train", "val"):
        subprocess.run(["bash", "-c", command[0]], cwd=tmp_path / part, check=False)
    assert load(tmp_path)[1] == ["01", "02", "10"]


def test_the_folder_itself_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"not an image", None], ids=["empty", "text", "cut off"])
def test_a_corrupt_image_is_named_or_skipped(tmp_path: Path, content: bytes | None) -> None:
    write_image_folder(tmp_path)
    broken = tmp_path / "train/bee/1.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2] if content is None else content)
    split, _ = load(tmp_path)
    index = [path for path, _ in split.train.samples].index(broken)
    with pytest.raises(CorruptImage, match=r"train/bee/1.jpg cannot be read"):
        split.train[index]
    split, _ = load(tmp_path, "skip")
    with pytest.warns(UserWarning, match=r"skipped: the image .*train/bee/1.jpg"):
        item = split.train[index]
    assert torch.equal(item["pixel_values"], split.train[index + 1]["pixel_values"])


def test_a_corrupt_test_image_is_fatal_whatever_is_configured(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    (tmp_path / "val/ant/0.png").write_bytes(b"broken")
    split, _ = load(tmp_path, "skip")
    with pytest.raises(CorruptImage, match=r"val/ant/0.png"):
        split.test[0]


def test_with_no_readable_image_skipping_ends(tmp_path: Path) -> None:
    write_image_folder(tmp_path, classes=("ant",), train=2)
    for path in (tmp_path / "train/ant").iterdir():
        path.write_bytes(b"broken")
    split, _ = load(tmp_path, "skip")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(CorruptImage, match="none of 2 images"):
        split.train[0]
