"""ListOps: nested MIN, MAX, MED and SUM_MOD of digits, as text; the answer is a digit.

The grammar and the sampling are those of the Long Range Arena (arXiv 2011.04006; google-research/long-range-arena,
lra_benchmarks/data/listops.py), which follow Nangia & Bowman, arXiv 1804.06028:

- a node is a digit with probability 0.75, always at the greatest depth, and otherwise an operator with 2 to
  ``max_arguments`` nodes below it; kinds, digits and numbers of arguments are uniform. The root has depth 1.
- the length counts a digit as 1 and an operator as 2 (its name and its bracket); an expression is kept if
  ``min_length`` < length < ``max_length``.
- MED of an even number of arguments is the mean of the middle two, rounded down; SUM_MOD is the sum modulo 10.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

OPERATOR_SHARE = 0.25
"""Probability that a node is an operator; VALUE_P in the source, where it is compared the other way round."""


def median(values: Sequence[int]) -> int:
    """
    >>> median([1, 2, 4, 9]), median([7, 0, 3])
    (3, 3)
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def sum_mod(values: Sequence[int]) -> int:
    """
    >>> sum_mod([9, 9, 4])
    2
    """
    return sum(values) % 10


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": median,
    "[SM": sum_mod,
}
CLOSE = "]"
DIGITS = tuple("0123456789")
TOKENS = ("<pad>", *DIGITS, *OPERATORS, CLOSE)
"""The vocabulary; a token's id is its place. Brackets are tokens: they say where an operator ends."""
IDS = {token: i for i, token in enumerate(TOKENS)}


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What is sampled. The defaults are the Long Range Arena's.

    Attributes:
        max_depth: of the tree, the root counted as 1.
        max_arguments: of an operator.
        min_length, max_length: the length in tokens lies strictly between them.
    """

    max_depth: int = 10
    max_arguments: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self) -> None:
        # An operator and two digits have four tokens; nothing else is shorter than that but a digit.
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_arguments * longest
        if self.max_arguments < 2 or self.max_depth < 1 or self.max_length - self.min_length < 2:
            raise ValueError(f"{self} leaves nothing to sample")
        if longest <= self.min_length:
            raise ValueError(
                f"the longest expression of {self} has {longest} tokens, {self.min_length} are too many"
            )


PUBLISHED = Grammar()


def sample(grammar: Grammar, rng: random.Random) -> list[str]:
    """The tokens of one expression, by rejection.

    >>> tokens = sample(Grammar(max_depth=3, max_arguments=4, min_length=5, max_length=20), random.Random(0))
    >>> " ".join(tokens), evaluate(tokens)
    ('[MAX [MAX 1 5 2 9 ] 4 [MAX 9 1 5 ] 5 ]', 9)
    """
    while True:
        tokens: list[str] = []
        if _grow(tokens, 1, grammar, rng) and len(tokens) > grammar.min_length:
            return tokens


def _grow(tokens: list[str], depth: int, grammar: Grammar, rng: random.Random) -> bool:
    """Append one node; False as soon as the expression is too long, which changes nothing about what is kept."""
    if depth >= grammar.max_depth or rng.random() >= OPERATOR_SHARE:
        tokens.append(DIGITS[int(10 * rng.random())])
        return len(tokens) < grammar.max_length
    names = tuple(OPERATORS)
    tokens.append(names[int(len(names) * rng.random())])
    for _ in range(2 + int((grammar.max_arguments - 1) * rng.random())):
        if not _grow(tokens, depth + 1, grammar, rng):
            return False
    tokens.append(CLOSE)
    return len(tokens) < grammar.max_length


def evaluate(tokens: Sequence[str]) -> int:
    """The value of an expression, 0 to 9; one pass with a stack.

    Raises:
        ValueError: the tokens are no expression; the message names the place.

    >>> evaluate("[MAX 1 [MIN 2 9 ] 3 ]".split()), evaluate("[MAX 1 [MIN 2 9 3 ] ]".split())
    (3, 2)
    """
    open_operators: list[tuple[str, list[int]]] = []
    for place, token in enumerate(tokens):
        if token in OPERATORS:
            open_operators.append((token, []))
            continue
        if token == CLOSE:
            if not open_operators or not open_operators[-1][1]:
                raise ValueError(
                    f"token {place}, {token!r}, closes an operator that is not open or has no arguments"
                )
            name, arguments = open_operators.pop()
            value = OPERATORS[name](arguments)
        elif token in DIGITS:
            value = int(token)
        else:
            raise ValueError(f"token {place}, {token!r}, is no token of ListOps: {', '.join(TOKENS[1:])}")
        if open_operators:
            open_operators[-1][1].append(value)
        elif place == len(tokens) - 1:
            return value
        else:
            raise ValueError(f"the expression ends at token {place}, but {len(tokens) - 1 - place} follow")
    raise ValueError(f"{len(open_operators)} operators are still open at the end of {len(tokens)} tokens")


def tokenize(text: str) -> list[str]:
    """The tokens of an expression; round brackets, which the official files have around every pair, are left out.

    >>> tokenize("( ( ( [MAX 2 ) 9 ) ] )")
    ['[MAX', '2', '9', ']']
    """
    return text.replace("(", " ").replace(")", " ").split()


def encode(tokens: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Ids from 1 to 15; 0 is padding.

    Raises ValueError for an unknown token.

    >>> encode(["[MAX", "2", "9", "]"]).tolist()
    [12, 3, 10, 15]
    """
    unknown = sorted(set(tokens) - set(TOKENS[1:]))
    if unknown:
        raise ValueError(f"no tokens of ListOps: {unknown}; there are {', '.join(TOKENS[1:])}")
    return np.array([IDS[token] for token in tokens], dtype=np.uint8)
