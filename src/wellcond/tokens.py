"""The correction C and the conditioned tokens X + C: Theorem 4.4 of the paper.

With X = U S Vᵀ, C = σ₁ U_r V_rᵀ. Then X + C has the singular values σ_i + σ₁ on the range of X, so
κ⁺(X + C) = 2σ₁/(σ_r + σ₁) ≤ 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.config import ConditioningConfig, Gradient, Rescale
from wellcond.linalg import Method, NullSpace, choose, polar, real_rows


def correction(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    method: Method = "auto",
    null_space: NullSpace = "range",
    rank_tol: float | None = None,
    gradient: Gradient = "constant",
) -> Tensor:
    """C = σ₁ U_r V_rᵀ for every matrix of tokens in a batch (Theorem 4.4).

    Args:
        x: tokens ``(..., N, d)``, any real floating dtype. Never changed in place, never aliased.
        mask: ``(..., N)`` bool, True = a real token; other rows get C = 0 and change nothing for the rest.
        method, null_space, rank_tol: see `wellcond.polar`.
        gradient: ``"constant"``: C carries no gradient. ``"exact"``: the closed-form derivative of σ₁ U_r V_rᵀ.

    Returns:
        C with shape and dtype of ``x``; NaN where a matrix is not finite.

    Raises:
        TypeError, ValueError: see `wellcond.polar`.

    >>> import torch
    >>> correction(torch.diag(torch.tensor([3.0, 1.0])))
    tensor([[3., 0.],
            [0., 3.]])
    """
    return _correction(x, mask, method, null_space, rank_tol, gradient).to(x.dtype)


def _correction(
    x: Tensor,
    mask: Tensor | None,
    method: Method,
    null_space: NullSpace,
    rank_tol: float | None,
    gradient: Gradient,
) -> Tensor:
    """`correction` before its one rounding to the dtype of ``x``."""
    choose("gradient", gradient, Gradient)
    source = x.detach() if gradient == "constant" else x
    factor, sigma_max, _ = polar(source, mask, method, null_space, rank_tol)
    return sigma_max[..., None, None] * factor


def conditioned_tokens(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    method: Method = "auto",
    null_space: NullSpace = "range",
    rank_tol: float | None = None,
    gradient: Gradient = "constant",
    rescale: Rescale = "none",
) -> Tensor:
    """X + C, whose condition number κ⁺ is at most 2 (Theorem 4.4), rounded once to the dtype of ``x``.

    Args:
        x, mask, method, null_space, rank_tol, gradient: see `correction`.
        rescale: ``"frobenius"`` returns (X+C)·‖X‖_F/‖X+C‖_F, norms over real rows: the same κ at the scale
            of X. Masked rows are returned as they came. Under ``gradient="constant"`` this factor, too, is a
            constant of the step.

    Returns:
        Tokens with shape and dtype of ``x``.

    Raises:
        TypeError, ValueError: see `wellcond.polar`.

    >>> import torch, wellcond
    >>> x = torch.diag(torch.tensor([1000.0, 1.0]))
    >>> round(wellcond.condition_number(conditioned_tokens(x)).item(), 3)
    1.998
    """
    choose("rescale", rescale, Rescale)
    with torch.autocast(x.device.type, enabled=False):
        y = x + _correction(x, mask, method, null_space, rank_tol, gradient)
        if rescale == "frobenius":
            ratio = frobenius_ratio(x, y, mask)
            ratio = ratio.detach() if gradient == "constant" else ratio
            real = torch.ones_like(x[..., :1], dtype=torch.bool) if mask is None else mask[..., None]
            y = torch.where(real, y * ratio[..., None, None], y)
        return y.to(x.dtype)


def frobenius_ratio(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖X‖_F/‖Y‖_F over real rows, ``(...)``; 1 where both are zero. Overflow-free: computed in float64.

    >>> import torch
    >>> frobenius_ratio(torch.ones(2, 2), 2 * torch.ones(2, 2)).item()
    0.5
    """
    x64, y64 = real_rows(x, mask).double(), real_rows(y, mask).double()
    scale = x64.detach().abs().amax((-2, -1), keepdim=True) if x.numel() else x64.new_ones(())
    scale = torch.where(scale > 0, scale, 1.0)
    squares_x, squares_y = (x64 / scale).square().sum((-2, -1)), (y64 / scale).square().sum((-2, -1))
    safe = squares_y > 0
    ratio = torch.where(safe, squares_x / torch.where(safe, squares_y, 1.0), 1.0).sqrt()
    return ratio.to(torch.promote_types(x.dtype, torch.float32))


class TokenConditioner(nn.Module):
    """`conditioned_tokens` as a module without parameters, buffers or state: ``forward(x, mask=None)``.

    Args:
        config: the options; the fields scope, placement, strength and sigma do not concern a single tensor
            and are ignored here.

    >>> import torch
    >>> TokenConditioner()(torch.eye(2))
    tensor([[2., 0.],
            [0., 2.]])
    """

    def __init__(self, config: ConditioningConfig | None = None) -> None:
        super().__init__()
        self.config = config or ConditioningConfig()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return conditioned_tokens(x, mask, **self.options())

    def options(self) -> dict[str, Any]:
        """The keyword arguments for `conditioned_tokens`."""
        names = ("method", "null_space", "rank_tol", "gradient", "rescale")
        return {name: getattr(self.config, name) for name in names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())
