"""ConditioningConfig: every choice the paper leaves open, in one frozen and serialisable place."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from wellcond.linalg import Method, NullSpace, choose

Gradient = Literal["constant", "exact"]
Rescale = Literal["none", "frobenius"]
Scope = Literal["sample", "table", "static"]
Placement = Literal["input", "tokens"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditioningConfig:
    """How tokens are conditioned. Immutable, comparable, and equal after a round trip through JSON.

    Attributes:
        method: how the polar factor is computed, see `wellcond.polar`.
        null_space: ``"range"`` (κ⁺ ≤ 2 for every X) or ``"complete"`` (κ ≤ 2 in the strict sense).
        rank_tol: singular values up to ``rank_tol``·σ₁ count as zero; None: 8 times the rounding noise.
        gradient: ``"constant"`` (C is a constant of the step) or ``"exact"`` (closed form).
        rescale: ``"none"`` (the paper) or ``"frobenius"`` (keep the tokens' Frobenius norm).
        scope: ``"sample"`` (each image or sequence; the paper's), ``"table"`` (the embedding table of a
            language model), ``"static"`` (a fixed code of the position; ours), or None: ``"table"`` on a
            causal model, ``"sample"`` on every other.
        placement: ``"input"`` (what enters the first block) or ``"tokens"`` (before positions are added).
        strength: λ/σ₁ of the static scope.
        sigma: σ₁ of the static scope, measured once by ``calibrate_``; None until then.
        allow_leak: let ``"sample"`` run on a causal model although every token then sees the future.

    Raises:
        ValueError: a field has a value outside the ones above; the message lists them.

    >>> config = ConditioningConfig(rescale="frobenius")
    >>> ConditioningConfig.from_dict(config.to_dict()) == config
    True
    """

    method: Method = "auto"
    null_space: NullSpace = "range"
    rank_tol: float | None = None
    gradient: Gradient = "constant"
    rescale: Rescale = "none"
    scope: Scope | None = None
    placement: Placement = "input"
    strength: float = 1.0
    sigma: float | None = None
    allow_leak: bool = False

    def __post_init__(self) -> None:
        choose("method", self.method, Method)
        choose("null_space", self.null_space, NullSpace)
        choose("gradient", self.gradient, Gradient)
        choose("rescale", self.rescale, Rescale)
        choose("placement", self.placement, Placement)
        if self.scope is not None:
            choose("scope", self.scope, Scope)
        if self.rank_tol is not None and not 0.0 <= self.rank_tol < 1.0:
            raise ValueError(f"rank_tol is a share of σ₁ in [0, 1), got {self.rank_tol}")
        if not self.strength > 0.0:
            raise ValueError(f"strength is λ/σ₁ > 0, got {self.strength}")
        if self.sigma is not None and not self.sigma > 0.0:
            raise ValueError(f"sigma is a singular value > 0, got {self.sigma}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ConditioningConfig:
        """The configuration that `to_dict` wrote; an unknown field raises ValueError and names it."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(
                f"unknown conditioning fields {unknown}; this version of wellcond knows {sorted(known)}"
            )
        return cls(**fields)
