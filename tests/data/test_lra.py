"""Published data of the Long Range Arena: folders as they unpack, what is cut is counted, what is missing is named."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from wellcond.data.lra import published
from wellcond.data.lra.sequences import Cutting, Pixels, Sequences, byte_ids


def ids_of(data: Dataset[Any], index: int, key: str = "input_ids") -> list[int]:
    found: list[int] = data[index][key].tolist()
    return found


# ---------------------------------------------------------------------------------------------- text


def write_reviews(folder: Path) -> None:
    for part in ("train", "test"):
        for name, text in (("pos", "good"), ("neg", "bad")):
            (folder / part / name).mkdir(parents=True)
            for i in range(2):
                (folder / part / name / f"{i}_7.txt").write_bytes(f"{text} é{i}".encode())


def test_reviews_are_bytes(tmp_path: Path) -> None:
    write_reviews(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = published.text_folder(tmp_path, length=100)
    assert [int(split.train[i]["labels"]) for i in range(4)] == [0, 0, 1, 1]
    assert bytes(i - 1 for i in ids_of(split.train, 3)).decode() == "good é1"
    assert split.details == {"reviews_cut": 0}


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    write_reviews(tmp_path)
    with pytest.warns(
        UserWarning, match=r"4 of 8 reviews are longer than 7 tokens \(the longest has 8\): cut"
    ):
        split = published.text_folder(tmp_path, length=7)
    assert [len(ids_of(split.test, i)) for i in range(4)] == [7, 7, 7, 7]
    assert split.details == {"reviews_cut": 4}


def test_missing_reviews_say_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train/neg. Download https://ai.stanford.edu.*--hub"):
        published.text_folder(tmp_path, length=100)


# ----------------------------------------------------------------------------------------- retrieval


def write_pairs(folder: Path) -> None:
    lines = ["1.0\tA\tB\tone text\tanother", "0.0\tA\tC\tone text\ta third, longer one"]
    for part in ("train", "test"):
        (folder / f"new_aan_pairs.{part}.tsv").write_text("\n".join(lines) + "\n")


def test_pairs_of_papers(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    with pytest.warns(UserWarning, match=r"2 of 8 papers are longer than 10 tokens \(the longest has 19\)"):
        split = published.retrieval_folder(tmp_path, length=10)
    assert bytes(i - 1 for i in ids_of(split.train, 1)) == b"one text"
    assert bytes(i - 1 for i in ids_of(split.train, 1, "other_ids")) == b"a third, l"
    assert [int(split.train[i]["labels"]) for i in range(2)] == [1, 0]


@pytest.mark.parametrize(
    "line", ["1\tA\tB\ttext", "2\tA\tB\tone\ttwo", "1\tA\tB\t\ttwo", "1\tA\tB\tone\ttwo\tthree"]
)
def test_broken_pairs_are_named(line: str, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    with (tmp_path / "new_aan_pairs.test.tsv").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"new_aan_pairs.test.tsv, line 3: expected a label"):
        published.retrieval_folder(tmp_path, length=100)


def test_missing_pairs_say_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no .*new_aan_pairs.train.tsv. Download .*lra_release.gz"):
        published.retrieval_folder(tmp_path, length=100)


# --------------------------------------------------------------------------------------------- image


class FakeCifar10:
    """torchvision's class verifies checksums of the real files; this has its two attributes."""

    def __init__(self, root: str, train: bool) -> None:
        count = 45_010 if train else 20
        self.data = np.random.default_rng(int(train)).integers(0, 256, (count, 2, 2, 3)).astype(np.uint8)
        self.targets = [i % 10 for i in range(count)]


def test_images_in_grey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    monkeypatch.setattr("torchvision.datasets.CIFAR10", FakeCifar10)
    for folder in (tmp_path, tmp_path / "cifar-10-batches-py"):
        split = published.image_folder(folder)
        assert (len(split.train), len(split.test)) == (45_000, 20)  # type: ignore[arg-type]
    pixels = FakeCifar10("", False).data[7].astype(float)
    expected = np.floor(pixels @ [0.2989, 0.587, 0.114] + 0.5).astype(int) + 1
    assert ids_of(split.test, 7) == expected.reshape(-1).tolist()
    assert int(split.test[7]["labels"]) == 7


def test_missing_or_broken_images_say_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no .*cifar-10-batches-py. Download https://www.cs.toronto.edu"
    ):
        published.image_folder(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ValueError, match=r"corrupted.*Download"):
        published.image_folder(tmp_path)


def test_grey_is_that_of_pillow_within_a_step() -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3)).astype(np.uint8)
    theirs = np.asarray(Image.fromarray(pixels[0]).convert("L")).astype(int)
    assert np.abs(published.grey(pixels)[0].astype(int) - theirs).max() <= 1


# ----------------------------------------------------------------------------------- the hub


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "gut", "label": 1}, {"text": "schlecht", "label": 0}]
    monkeypatch.setattr(published, "_from_hub", lambda name: {"train": rows, "test": rows})
    split = published.text_hub(length=10)
    assert bytes(i - 1 for i in ids_of(split.test, 1)) == b"schlecht"
    assert int(split.test[0]["labels"]) == 1


def test_a_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr("datasets.load_dataset", fails)
    for read in (published.image_hub, lambda: published.text_hub(length=10)):
        with pytest.raises(ConnectionError, match=r"no route to host.*--data-dir"):
            read()


# -------------------------------------------------------------------------------------- sequences


def test_every_byte_is_a_token() -> None:
    assert byte_ids(bytes(range(256))).tolist() == list(range(1, 257))


def test_sequences_keep_together() -> None:
    with pytest.raises(ValueError, match="2 sequences and 1 labels"):
        Sequences([byte_ids(b"a"), byte_ids(b"b")], [1])
    with pytest.raises(ValueError, match="sequence 1 is empty or holds 0"):
        Sequences([byte_ids(b"a"), byte_ids(b"")], [1, 0])
    with pytest.raises(ValueError, match="sequence 0 is empty or holds 0"):
        Sequences([np.array([3, 0], np.uint8)], [1])


def test_pixels_are_grey_bytes() -> None:
    for images in (np.zeros((2, 4, 4, 3), np.uint8), np.zeros((2, 4, 4)), np.zeros((3, 4, 4), np.uint8)):
        with pytest.raises(ValueError, match="grey images"):
            Pixels(images, np.zeros(2))  # type: ignore[arg-type]


def test_nothing_cut_is_nothing_said() -> None:
    cutting = Cutting(3)
    assert torch.equal(torch.tensor(cutting.cut(byte_ids(b"abc")).astype(int)), torch.tensor([98, 99, 100]))
    assert cutting.report("texts") is None
