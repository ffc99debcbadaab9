import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.folders import idx_bytes, write_idx_folder
from wellcond.data import idx_folder, read_idx

INSTALL = "Install the package."


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), zipped=st.booleans(), seed=st.integers(0, 9)
)
def test_any_array_comes_back(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], zipped: bool, seed: int
) -> None:
    array = np.random.default_rng(seed).integers(0, 256, shape)
    content = idx_bytes(array)
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    assert torch.equal(read_idx(path), torch.from_numpy(array.astype(np.uint8)))


GOOD = idx_bytes(np.arange(12).reshape(3, 4))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no IDX file"),
        (b"<html>404</html>", "no IDX file: it begins with 3c 68 74 6d"),
        (bytes([0, 0, 0x0D, 1]) + bytes(8), "type 0x0d"),
        (GOOD[:7], "cut off in its header"),
        (GOOD[:-1], "is cut off: its header says .3, 4., 12 bytes, but 11 follow"),
        (GOOD + b"x", "has bytes left over"),
        (gzip.compress(GOOD, mtime=0)[:-12], "broken gzip"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), "broken gzip"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as error:
        read_idx(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_gives_normalised_images(tmp_path: Path, zipped: bool) -> None:
    # npm packages keep their data in a folder of their own.
    write_idx_folder(tmp_path / "deeper", train=40, test=20, zipped=zipped)
    split = idx_folder(tmp_path, install=INSTALL)
    train = torch.stack([split.train[i]["pixel_values"] for i in range(40)])
    assert train.shape == (40, 1, 28, 28)
    assert len(split.test) == 20  # type: ignore[arg-type]
    assert abs(train.mean()) < 1e-5
    assert abs(train.std() - 1) < 1e-5
    item = split.test[13]
    assert item["labels"] == 3
    assert item["pixel_values"][0].mean(1).argmax() == 2 * 3 + 2


def test_names_with_a_dot_are_understood(tmp_path: Path) -> None:
    write_idx_folder(tmp_path)
    for path in tmp_path.iterdir():
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert len(idx_folder(tmp_path, install=INSTALL).train) == 40  # type: ignore[arg-type]


def test_what_is_missing_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere. Install the package"):
        idx_folder(tmp_path / "nowhere", install=INSTALL)
    write_idx_folder(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"no t10k-labels-idx1-ubyte.*Install the package"):
        idx_folder(tmp_path, install=INSTALL)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    folder = write_idx_folder(tmp_path / "a")
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(39)))
    with pytest.raises(ValueError, match=r"has 40 images, but .* 39 labels"):
        idx_folder(folder, install=INSTALL)
    labels.write_bytes(idx_bytes(np.full(40, 10)))
    with pytest.raises(ValueError, match="has the label 10"):
        idx_folder(folder, install=INSTALL)
    labels.write_bytes(idx_bytes(np.zeros((40, 1))))
    with pytest.raises(ValueError, match="has 2 dimensions, expected 1"):
        idx_folder(folder, install=INSTALL)


def test_two_data_sets_below_one_folder_are_refused(tmp_path: Path) -> None:
    write_idx_folder(tmp_path / "mnist")
    write_idx_folder(tmp_path / "fashion")
    with pytest.raises(ValueError, match="there 2 times"):
        idx_folder(tmp_path, install=INSTALL)
