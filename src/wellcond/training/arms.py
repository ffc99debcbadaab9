"""Arms: the same training with and without conditioning, and with the controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from wellcond.attach import attach_, attach_to_table_, condition_, find_known
from wellcond.config import ConditioningConfig
from wellcond.static import calibrate_
from wellcond.training.controls import ScaledTable, ScaledTokens, amplify_positions_

Change = Callable[[nn.Module, Any], object]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: as in tables and files.
        description: one line for people.
        change: what is done to the fresh model, ``change(model, batch)`` with a real batch; None: nothing.
        leaks: whether tokens see later ones although the model is causal.
        control: whether it changes what conditioning changes besides the condition number, and does not condition.
    """

    name: str
    description: str
    change: Change | None = None
    leaks: bool = False
    control: bool = False

    def apply_(self, model: nn.Module, batch: Any) -> None:
        """Change a fresh model in place. ``batch`` is what the model is called with."""
        if self.change is not None:
            self.change(model, batch)


def conditioned(**options: Any) -> Change:
    """A change that conditions with these options, calibrating on the batch where the scope is static."""

    def change(model: nn.Module, batch: Any) -> None:
        handle = condition_(model, ConditioningConfig(**options))
        if handle.config is not None and handle.config.scope == "static":
            calibrate_(model, [batch])

    return change


def leaking(model: nn.Module, batch: Any) -> None:
    """The paper's C on a causal model, from the whole sequence; ValueError on any other, where nothing leaks."""
    found = find_known(model)
    if not found.sites.causal:
        raise ValueError(
            f"{type(found.module).__name__} is not causal, nothing leaks there: take the arm 'conditioned'"
        )
    condition_(model, ConditioningConfig(scope="sample", allow_leak=True))


def scaled(model: nn.Module, batch: Any) -> None:
    """The control `ScaledTokens` where conditioning would be; `ScaledTable` on a causal model, which leaks nothing."""
    if find_known(model).sites.causal:
        attach_to_table_(model, ScaledTable())
    else:
        attach_(model, ScaledTokens(), None, "input")


ARMS = (
    Arm("baseline", "the model as it is"),
    Arm(
        "conditioned",
        "X + C where tokens enter the first block; on a decoder E + C of its table",
        conditioned(),
    ),
    Arm("conditioned-tokens", "X + C before positions are added", conditioned(placement="tokens")),
    Arm("rescaled", "X + C at the Frobenius norm of X", conditioned(rescale="frobenius")),
    Arm(
        "static",
        "X + λQ, a fixed code of the position, λ = σ₁ (not in the paper)",
        conditioned(scope="static"),
    ),
    Arm(
        "conditioned-paper",
        "on a decoder X + C of the whole sequence, as the paper has it; scored prefix-only too",
        leaking,
        leaks=True,
    ),
    Arm("scaled", "control: no conditioning, X at the Frobenius norm of X + C", scaled, control=True),
    Arm(
        "positions",
        "control: no conditioning, positions with the weight against the content that X + C gives them",
        amplify_positions_,
        control=True,
    ),
)


def select_arms(names: Iterable[str]) -> tuple[Arm, ...]:
    """The arms of these names, in the order given; ValueError lists the known ones.

    >>> [arm.name for arm in select_arms(["baseline", "scaled"])]
    ['baseline', 'scaled']
    """
    known = {arm.name: arm for arm in ARMS}
    chosen = list(names)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise ValueError(f"unknown arms {unknown}; choose among {', '.join(known)}")
    repeated = sorted({name for name in chosen if chosen.count(name) > 1})
    if repeated:
        raise ValueError(f"arms named twice: {', '.join(repeated)}")
    return tuple(known[name] for name in chosen)
