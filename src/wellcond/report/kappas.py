"""From rows to the three quantities of the paper's Figures 2 to 4, per arm, seed and step."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wellcond.monitor.rows import Row
from wellcond.report.folder import MeasuredRow

Array = NDArray[np.float64]
QUANTITIES = {
    "tokens": "Embedded tokens",
    "first_layer": "Self-attention, first layer",
    "all_layers": "Self-attention, all layers",
}


def belongs(row: Row, quantity: str) -> bool:
    """Whether a row is averaged into a quantity: attention means each head's softmax(QKᵀ/√d)V.

    >>> belongs(Row(0, "tokens", None, None, 3.0, 3.0, 4, 3.0, 1.0, "blocks.0", 8), "tokens")
    True
    """
    if quantity == "tokens":
        return row.site == "tokens"
    return row.site == "attention.output" and (quantity == "all_layers" or row.layer == 0)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """κ and κ⁺ of one arm over training: arithmetic means over heads and layers.

    Attributes:
        steps: ``(S,)`` the steps that every seed has.
        kappa, kappa_pinv: ``(seeds, S)``; κ is inf where one averaged matrix is rank-deficient.
        left_out: how many steps are not here because some seed lacks them.
    """

    steps: NDArray[np.int64]
    kappa: Array
    kappa_pinv: Array
    left_out: int


@dataclasses.dataclass(frozen=True)
class Panel:
    """One quantity for all arms, in one unit: κ, or κ⁺ for every arm as soon as κ is infinite in one.

    Attributes:
        symbol: ``"κ"`` or ``"κ⁺"``.
        values: per arm ``(seeds, S)``; steps likewise.
        infinite: the arms in which κ is infinite at some step.
        left_out: steps that some seed lacks, over all arms.
    """

    quantity: str
    symbol: str
    steps: Mapping[str, NDArray[np.int64]]
    values: Mapping[str, Array]
    infinite: tuple[str, ...]
    left_out: int

    @property
    def title(self) -> str:
        return QUANTITIES[self.quantity]

    def averages(self) -> dict[str, Array]:
        """Per arm the mean over training, one number per seed; nan where a measurement was nan."""
        return {arm: values.mean(axis=1) for arm, values in self.values.items()}


def panels(rows: Sequence[MeasuredRow], arms: Sequence[str]) -> list[Panel]:
    """A panel per quantity that was measured, arms in the order given."""
    found = []
    for quantity in QUANTITIES:
        chosen = [item for item in rows if belongs(item.row, quantity)]
        paths = {arm: trajectory([item for item in chosen if item.arm == arm]) for arm in arms}
        present = {arm: path for arm, path in paths.items() if path is not None}
        if not present:
            continue
        infinite = tuple(arm for arm, path in present.items() if np.isinf(path.kappa).any())
        found.append(
            Panel(
                quantity=quantity,
                symbol="κ⁺" if infinite else "κ",
                steps={arm: path.steps for arm, path in present.items()},
                values={arm: path.kappa_pinv if infinite else path.kappa for arm, path in present.items()},
                infinite=infinite,
                left_out=sum(path.left_out for path in present.values()),
            )
        )
    return found


def trajectory(rows: Sequence[MeasuredRow]) -> Trajectory | None:
    """Mean over heads and layers at each step, one line per seed; None where nothing was measured."""
    cells: dict[int, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for item in rows:
        cells[item.seed][item.row.step].append(item.row)
    if not cells:
        return None
    by_seed = [set(steps) for steps in cells.values()]
    shared = sorted(set.intersection(*by_seed))
    if not shared:
        raise ValueError(
            f"rows.jsonl: the seeds {sorted(cells)} of arm {rows[0].arm!r} have no measured step in common"
        )

    def table(name: str) -> Array:
        return np.array(
            [
                [np.mean([getattr(row, name) for row in cells[seed][step]]) for step in shared]
                for seed in sorted(cells)
            ]
        )

    return Trajectory(
        np.array(shared), table("kappa"), table("kappa_pinv"), len(set.union(*by_seed)) - len(shared)
    )
