"""Pairs of glosses from WordNet: does the second explain what the first is a kind of?

WordNet's files come with the Debian package wordnet-base. Source of their format: its manual page wndb(5WN).
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path

from wellcond.data.sentences import Example

WORDNET_FOLDER = Path("/usr/share/wordnet")
"""Where the Debian package wordnet-base puts its files."""

INSTALL = "Install the Debian package wordnet-base, or name a folder with WordNet's data.noun and data.verb"

HYPERNYM = "@"
PARTS = ("noun", "verb")


@dataclasses.dataclass(frozen=True)
class Synset:
    """One meaning.

    Attributes:
        key: file and place in it, such as ``noun 00004258``.
        words: that have this meaning.
        gloss: its explanation, without the examples.
        hypernyms: keys of what it is a kind of.
    """

    key: str
    words: tuple[str, ...]
    gloss: str
    hypernyms: tuple[str, ...]


def read_wordnet(folder: str | os.PathLike[str] = WORDNET_FOLDER) -> dict[str, Synset]:
    """All synsets of nouns and verbs by their key, in the order of the files; others have no hypernyms.

    Raises:
        FileNotFoundError: it is not installed there; the message says how to get it.
        ValueError: a line is broken; the message names file and line.
    """
    found: dict[str, Synset] = {}
    for part in PARTS:
        path = Path(folder) / f"data.{part}"
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}. {INSTALL}")
        for synset in _synsets(path, part):
            found[synset.key] = synset
    return found


def _synsets(path: Path, part: str) -> Iterator[Synset]:
    for number, line in enumerate(path.read_text(encoding="ascii").split("\n"), 1):
        if not line or line.startswith("  "):  # the licence
            continue
        try:
            yield parse(line, part)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}, line {number} is no synset: {error}") from error


def parse(line: str, part: str) -> Synset:
    """One line of ``data.PART``.

    >>> parse("00004475 03 n 01 living_thing 0 001 @ 00003553 n 0000 | alive; \\"it is alive\\"", "noun")
    Synset(key='noun 00004475', words=('living thing',), gloss='alive', hypernyms=('noun 00003553',))
    """
    data, _, explanation = line.partition(" | ")
    fields = data.split()
    count = int(fields[3], 16)
    words = tuple(fields[4 + 2 * i].replace("_", " ") for i in range(count))
    start = 4 + 2 * count
    pointers = [fields[start + 1 + 4 * i : start + 5 + 4 * i] for i in range(int(fields[start]))]
    hypernyms = tuple(
        f"{part} {offset}" for kind, offset, where, _ in pointers if kind == HYPERNYM and where == part[0]
    )
    # Examples follow in quotation marks, after a semicolon.
    gloss = explanation.split('; "')[0].strip()
    if not gloss:
        raise ValueError("there is no gloss")
    return Synset(f"{part} {fields[0]}", words, gloss, hypernyms)


def gloss_pairs(
    folder: str | os.PathLike[str] = WORDNET_FOLDER, *, train: int, validation: int, seed: int = 0
) -> tuple[list[Example], list[Example]]:
    """Pairs (gloss of a meaning, gloss of what it is a kind of), half of them right (1) and half wrong (0).

    Right and wrong pairs have the same second glosses, so that neither gloss alone tells the label. No first gloss is
    in both the training and the validation pairs, and every meaning is there once.

    Args:
        folder: of WordNet's files.
        train, validation: how many pairs; even.
        seed: which ones.

    Raises:
        ValueError: a number is odd or not positive, or there are not so many.
    """
    for count in (train, validation):
        if count < 4 or count % 2:
            raise ValueError(f"half of the pairs are right: count them by an even number from 4, got {count}")
    synsets = read_wordnet(folder)
    draw = random.Random(seed)
    meanings: dict[str, Synset] = {}
    for synset in synsets.values():
        if synset.hypernyms:
            meanings.setdefault(synset.gloss, synset)  # some meanings share a gloss
    order = list(meanings.values())
    if train + validation > len(order):
        raise ValueError(
            f"WordNet has {len(order)} meanings with a hypernym, fewer than {train} + {validation}"
        )
    draw.shuffle(order)
    return (
        _pairs(order[:train], synsets, draw),
        _pairs(order[train : train + validation], synsets, draw),
    )


def _pairs(chosen: list[Synset], synsets: dict[str, Synset], draw: random.Random) -> list[Example]:
    half = len(chosen) // 2
    right = [Example(s.gloss, _hypernym(s, synsets), 1) for s in chosen[:half]]
    # The second glosses of the right pairs once more, each with a meaning that it does not explain.
    seconds = [example.second for example in right]
    draw.shuffle(seconds)
    explained = [{synsets[key].gloss for key in s.hypernyms} for s in chosen[half:]]
    for i in range(half):
        if seconds[i] in explained[i]:
            swap = (
                j for j in range(half) if seconds[j] not in explained[i] and seconds[i] not in explained[j]
            )
            j = next(swap, None)
            if j is None:
                raise ValueError(
                    f"no wrong gloss is left for {chosen[half + i].words[0]!r}: ask for more pairs"
                )
            seconds[i], seconds[j] = seconds[j], seconds[i]
    wrong = [Example(s.gloss, second, 0) for s, second in zip(chosen[half:], seconds, strict=True)]
    pairs = right + wrong
    draw.shuffle(pairs)
    return pairs


def _hypernym(synset: Synset, synsets: dict[str, Synset]) -> str:
    return synsets[synset.hypernyms[0]].gloss
