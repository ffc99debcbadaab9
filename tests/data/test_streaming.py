import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.data.folders import write_image_folder
from wellcond.data import CorruptImage, StreamedImages, stream


def small(image: Any) -> Tensor:
    from torchvision.transforms.functional import to_tensor

    return to_tensor(image)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `datasets` reads as it reads the hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    root = write_image_folder(tmp_path / "images", train=4, val=2)
    (root / "val").rename(root / "validation")
    return root


def labels(images: StreamedImages, epoch: int) -> list[int]:
    return [row["label"] for row in images.rows(epoch)]


def test_a_stream_gives_every_image_once_in_another_order_each_epoch(folder: Path) -> None:
    split, classes = stream(str(folder), train=small, test=small)
    assert classes == ["ant", "bee", "cat"]
    train, test = split.train, split.test
    assert isinstance(train, StreamedImages)
    assert isinstance(test, StreamedImages)
    assert (len(train), len(test)) == (12, 6)
    first, second = labels(train, 0), labels(train, 1)
    assert sorted(first) == sorted(second) == [0] * 4 + [1] * 4 + [2] * 4
    assert first != second
    assert labels(train, 0) == first
    assert [item["labels"].item() for item in test] == [0, 0, 1, 1, 2, 2]
    item = test.first(1)[0]
    assert item["pixel_values"].shape == (3, 32, 40)
    assert item["pixel_values"].mean((1, 2)).argmax() == 0


def test_a_loader_of_two_workers_gives_every_image_once(folder: Path) -> None:
    split, _ = stream(str(folder), train=small, test=small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than shards
        found = torch.cat([batch["labels"] for batch in DataLoader(split.test, batch_size=4, num_workers=2)])
    assert sorted(found.tolist()) == [0, 0, 1, 1, 2, 2]


def test_a_part_of_a_stream_is_its_beginning(folder: Path) -> None:
    split, _ = stream(str(folder), train=small, test=small)
    assert isinstance(split.train, StreamedImages)
    short = split.train.take(5)
    assert len(short) == len(labels(short, 0)) == 5
    assert len(split.train) == len(labels(split.train, 0)) == 12


def test_a_corrupt_image_is_named_or_left_out(folder: Path) -> None:
    (folder / "train/bee/1.jpg").write_bytes(b"broken")
    split, _ = stream(str(folder), train=small, test=small)
    with pytest.raises(CorruptImage, match=r"bee/1.jpg of the stream cannot be read"):
        list(split.train)
    split, _ = stream(str(folder), train=small, test=small, corrupt="skip")
    with pytest.warns(UserWarning, match=r"skipped: the image .*bee/1.jpg"):
        assert len(list(split.train)) == 11


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(
        ConnectionError, match=r"cannot stream 'ILSVRC/imagenet-1k'.*leave HF_HUB_OFFLINE unset"
    ):
        stream(train=small, test=small)


def test_data_of_another_form_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text/train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no split validation"):
        stream(str(tmp_path / "text"), train=small, test=small)
    (tmp_path / "text/validation.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected image and label"):
        stream(str(tmp_path / "text"), train=small, test=small)
