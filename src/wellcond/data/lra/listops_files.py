"""ListOps on disk: written as the Long Range Arena's files are, read from there or from the official download."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from wellcond.data.images import Split
from wellcond.data.lra.generating import agree, write_parts, write_whole
from wellcond.data.lra.listops import PUBLISHED, Grammar, encode, evaluate, sample, tokenize
from wellcond.data.lra.sequences import Ids, Sequences, require_fit

HEADER = "Source\tTarget"
GENERATE = "Generate it: python -m wellcond.data.lra listops FOLDER"


@dataclasses.dataclass(frozen=True)
class Counts:
    """Samples of each part; the defaults are the Long Range Arena's ListOps."""

    train: int = 96_000
    val: int = 2_000
    test: int = 2_000

    @property
    def total(self) -> int:
        return self.train + self.val + self.test


COUNTS = Counts()


def expression(grammar: Grammar, seed: int, index: int, attempt: int = 0) -> list[str]:
    """Sample ``index`` of a data set: the tokens depend on these four arguments only."""
    # A string as seed is hashed by SHA-512, and random() is the one method that Python promises to keep.
    return sample(grammar, random.Random(f"listops/{seed}/{index}/{attempt}"))


def expressions(grammar: Grammar, seed: int, count: int) -> list[list[str]]:
    """``count`` different expressions; one that was there before is drawn anew, so that no part repeats another.

    Raises ValueError if the grammar has too few.
    """
    lines = (" ".join(expression(grammar, seed, index)) for index in range(count))
    return [line.split() for line in _distinct(lines, grammar, seed)]


def listops(grammar: Grammar, *, train: int, test: int, seed: int = 0) -> Split:
    """Expressions made in memory: for short ones, of which thousands take a second.

    >>> split = listops(Grammar(max_depth=3, max_arguments=4, min_length=5, max_length=20), train=3, test=2)
    >>> len(split.train), len(split.test), split.train[0]
    (3, 2, {'input_ids': tensor([...]), 'labels': tensor(...)})
    """
    found = expressions(grammar, seed, train + test)
    ids, labels = [encode(tokens) for tokens in found], [evaluate(tokens) for tokens in found]
    return Split(Sequences(ids[:train], labels[:train]), Sequences(ids[train:], labels[train:]))


def write_listops(
    folder: Path, *, grammar: Grammar = PUBLISHED, counts: Counts = COUNTS, seed: int = 0, workers: int = 1
) -> None:
    """``basic_train.tsv``, ``basic_val.tsv`` and ``basic_test.tsv``: expression, tab, answer.

    Interrupted, the same call goes on; files that are there already stay as they are.

    Raises:
        ValueError: the folder holds ListOps of another seed, grammar or size.
    """
    settings = {"seed": seed, "counts": dataclasses.asdict(counts), "grammar": dataclasses.asdict(grammar)}
    folder.mkdir(parents=True, exist_ok=True)
    agree(folder / "listops.json", settings)
    files = {name: folder / f"basic_{name}.tsv" for name in ("train", "val", "test")}
    if all(path.exists() for path in files.values()):
        return
    parts = folder / "parts"
    paths = write_parts(partial(_write_part, grammar, seed), counts.total, parts, settings, workers=workers)
    lines = _distinct(_lines(paths), grammar, seed)
    for name, path in files.items():
        write_whole(path, partial(_write_lines, lines, getattr(counts, name)))
    shutil.rmtree(parts)


def read_listops(folder: Path, *, length: int) -> Split:
    """Training and test expressions of a folder, as this library or the Long Range Arena wrote them.

    Raises:
        FileNotFoundError: a file is missing; the message says how to make it.
        ValueError: a line is broken, or an expression has more than ``length`` tokens.
    """
    return Split(_read(folder / "basic_train.tsv", length), _read(folder / "basic_test.tsv", length))


def _write_part(grammar: Grammar, seed: int, part: range, path: Path) -> None:
    path.write_text("".join(" ".join(expression(grammar, seed, i)) + "\n" for i in part), encoding="ascii")


def _lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield from path.read_text(encoding="ascii").splitlines()


def _distinct(lines: Iterator[str], grammar: Grammar, seed: int) -> Iterator[str]:
    seen: set[bytes] = set()
    for index, line in enumerate(lines):
        attempt = 0
        while (digest := hashlib.blake2b(line.encode(), digest_size=16).digest()) in seen:
            attempt += 1
            if attempt == 1000:
                raise ValueError(
                    f"{grammar} gives too few expressions: after {index} different ones a thousand in a row were there "
                    f"before; ask for fewer, or allow longer ones"
                )
            line = " ".join(expression(grammar, seed, index, attempt))
        seen.add(digest)
        yield line


def _write_lines(lines: Iterator[str], count: int, path: Path) -> None:
    with path.open("w", encoding="ascii", newline="\n") as file:
        file.write(HEADER + "\n")
        for _ in range(count):
            line = next(lines)
            file.write(f"{line}\t{evaluate(line.split())}\n")


def _read(path: Path, length: int) -> Sequences:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}. {GENERATE}")
    ids: list[Ids] = []
    labels: list[int] = []
    with path.open(encoding="ascii") as file:
        if (header := file.readline().strip()) != HEADER:
            raise ValueError(f"{path} begins with {header[:40]!r}, not with {HEADER!r}")
        for number, line in enumerate(file, 2):
            source, tab, target = line.rstrip("\r\n").partition("\t")
            if not tab or not target.isdecimal() or not 0 <= int(target) <= 9:
                raise ValueError(f"{path}, line {number}: no expression, tab and digit: {line[-40:]!r}")
            ids.append(require_fit(encode(tokenize(source)), length, f"{path}, line {number},"))
            labels.append(int(target))
    return Sequences(ids, labels)
