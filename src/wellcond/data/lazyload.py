"""R's lazy-load databases, NAME.rdx and NAME.rdb: how an installed R package keeps its data sets.

The index ``.rdx`` is a compressed, serialised R list: for each object its offset and length in ``.rdb``. There each
object is a 4-byte big-endian length followed by zlib data. Both use R's XDR serialisation.
Source: "R Internals", sections 1.8 (serialization formats) and ``makeLazyLoadDB`` in R's ``tools``.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

NIL, SYMBOL, PAIRLIST, CHARACTERS, LOGICALS, INTEGERS, REALS, STRINGS, LIST = (
    254, 1, 2, 9, 10, 13, 14, 16, 19,
)  # fmt: skip
REFERENCE = 255
HAS_ATTRIBUTES, HAS_TAG = 0x200, 0x400
LATIN1 = 1 << 2


def read_strings(database: str | Path) -> dict[str, list[str]]:
    """The character vectors of a lazy-load database, by name; a missing string is an error.

    Args:
        database: path without the ending, such as ``/usr/lib/R/site-library/janeaustenr/data/Rdata``.

    Raises:
        FileNotFoundError: the index or the database is missing.
        ValueError: a file is broken, or an object is no character vector; the message names it.
    """
    index, store = Path(f"{database}.rdx"), Path(f"{database}.rdb")
    for path in (index, store):
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}")
    table = _unserialised(_inflated(index.read_bytes(), index), index)
    places = table.get("variables") if isinstance(table, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{index} is no index of a lazy-load database")
    content = store.read_bytes()
    found = {}
    for name, (offset, length) in places.items():
        where = f"{store}, object {name!r}"
        if offset + length > len(content):
            raise ValueError(f"{where} ends at byte {offset + length} of {len(content)}: the file is cut off")
        (size,) = struct.unpack_from(">I", content, offset)
        data = _inflated(content[offset + 4 : offset + length], where)
        if len(data) != size:
            raise ValueError(f"{where} has {len(data)} bytes, and should have {size}")
        value = _unserialised(data, where)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{where} is no vector of strings without missing ones")
        found[name] = value
    return found


def _inflated(data: bytes, where: object) -> bytes:
    try:
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else zlib.decompress(data)
    except (zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{where} is neither zlib nor gzip data ({error})") from error


def _unserialised(data: bytes, where: object) -> Any:
    try:
        return _Reader(data).value()
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is no R object in XDR form, or broken ({error})") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class _Reader:
    """Reads one serialised object: lists with names become dicts, vectors lists, a missing string None."""

    def __init__(self, data: bytes) -> None:
        if data[:2] != b"X\n":
            raise ValueError(f"expected an R object in XDR form, found {data[:2]!r}")
        self.data, self.at = data, 2
        self.symbols: list[Any] = []
        version, _, _ = (self.integer() for _ in range(3))
        if version == 3:
            self.take(
                self.integer()
            )  # the name of the writer's native encoding; strings have their own marks
        elif version != 2:
            raise ValueError(f"R serialisation version {version} is not known, only 2 and 3")

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise ValueError(f"{count} bytes expected at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self) -> int:
        return int(struct.unpack(">i", self.take(4))[0])

    def value(self) -> Any:
        flags = self.integer()
        kind = flags & 0xFF
        if kind == NIL:
            return None
        if kind == REFERENCE:
            return self.symbols[(flags >> 8 or self.integer()) - 1]
        if kind == SYMBOL:
            self.symbols.append(self.value())
            return self.symbols[-1]
        if kind == PAIRLIST:
            return self.pairs(flags)
        if kind == CHARACTERS:
            length = self.integer()
            encoding = "latin-1" if (flags >> 12) & LATIN1 else "utf-8"
            return None if length == -1 else self.take(length).decode(encoding)
        vector = self.vector(kind)
        attributes = self.value() if flags & HAS_ATTRIBUTES else None
        names = attributes.get("names") if isinstance(attributes, dict) else None
        return dict(zip(names, vector, strict=True)) if kind == LIST and names is not None else vector

    def vector(self, kind: int) -> list[Any]:
        if kind not in (LOGICALS, INTEGERS, REALS, STRINGS, LIST):
            raise ValueError(f"an R object of type {kind} is not understood here")
        length = self.integer()
        if length < 0:
            raise ValueError("vectors of 2³¹ items and more are not understood here")
        if kind in (STRINGS, LIST):
            return [self.value() for _ in range(length)]
        code, size = ("d", 8) if kind == REALS else ("i", 4)
        return list(struct.unpack(f">{length}{code}", self.take(length * size)))

    def pairs(self, flags: int) -> dict[Any, Any]:
        """A pairlist with tags, such as the attributes of a vector."""
        found: dict[Any, Any] = {}
        while flags & 0xFF == PAIRLIST:
            if flags & HAS_ATTRIBUTES:
                self.value()
            tag = self.value() if flags & HAS_TAG else len(found)
            found[tag] = self.value()
            flags = self.integer()
        if flags & 0xFF != NIL:
            raise ValueError(f"a pairlist ends with an object of type {flags & 0xFF}")
        return found
