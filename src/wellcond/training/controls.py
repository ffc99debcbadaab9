"""Controls: what conditioning changes besides the condition number, changed on its own.

X + C is larger than X, and with placement "input" it weighs the positions differently. An arm that does only
that shows how much of a gain is due to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attach import find_known, place_of
from wellcond.running import call_model, undisturbed
from wellcond.tokens import conditioned_tokens, frobenius_ratio


class ScaledTokens(nn.Module):
    """X·‖X+C‖_F/‖X‖_F, per sample: the norm of the conditioned tokens without their condition number.

    The ratio is a constant of the step, like C itself.

    >>> x = torch.diag(torch.tensor([3.0, 1.0]))
    >>> y = ScaledTokens()(x)
    >>> bool(torch.isclose(y.norm(), conditioned_tokens(x).norm())), (y[0, 0] / y[1, 1]).item()
    (True, 3.0)
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        source = x.detach()
        ratio = frobenius_ratio(conditioned_tokens(source, mask), source, mask)[..., None, None]
        with torch.autocast(x.device.type, enabled=False):
            scaled = x * ratio
            if mask is not None:
                scaled = torch.where(mask[..., None], scaled, x)
            return scaled.to(x.dtype)


@torch.no_grad()
def amplify_positions_(model: nn.Module, batch: Any) -> float:
    """Multiply the position embeddings once, so that they have the share that conditioning would give them.

    With placement "input" X = T + P (tokens and positions), and X + C = X W with W = I + σ₁ V_r S⁻¹ V_rᵀ:
    conditioning turns P into P W, whose share of the norm is ‖P W‖_F/‖X W‖_F. The factor a solves
    ‖aP‖_F/‖T + aP‖_F = that share, both taken over the whole batch.

    Args:
        model: a known model with a position embedding that is a parameter ``(1, N, d)``.
        batch: real inputs, what the model is called with.

    Returns:
        The factor a.

    Raises:
        ValueError: the model adds no position parameter of the shape of its tokens.
    """
    found = find_known(model)
    path = found.sites.positions
    positions = None if path is None else _parameter(found.module, path)
    kept: list[Tensor] = []
    place = place_of(found, "input")

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(place.as_tokens(output if place.key is None else output[place.key]).double())

    if place.side != "output":
        raise ValueError(f"{type(found.module).__name__} receives its tokens with positions added already")
    handle = model.get_submodule(place.module).register_forward_hook(keep)
    try:
        with undisturbed(model):
            call_model(model, batch)
    finally:
        handle.remove()
    x = kept[0]
    if positions is None or positions.shape[-2:] != x.shape[-2:]:
        shape = None if positions is None else tuple(positions.shape)
        raise ValueError(
            f"the control 'positions' multiplies a position parameter (1, N, d); {type(found.module).__name__} "
            f"has {shape} for tokens of shape {tuple(x.shape)}: leave this arm out"
        )

    p = positions.detach().double().expand_as(x)
    share = _position_share(x, p)
    t = x - p
    # ‖aP‖² = share²·‖T + aP‖², the positive root of a quadratic in a.
    t2, tp, p2 = (t * t).sum().item(), (t * p).sum().item(), (p * p).sum().item()
    if p2 == 0.0:
        raise ValueError("the position embeddings are zero: no factor gives them a share of the norm")
    a, b, c = (1 - share**2) * p2, -2 * share**2 * tp, -(share**2) * t2
    factor = float((-b + (b * b - 4 * a * c) ** 0.5) / (2 * a))
    positions.mul_(factor)
    return factor


def _position_share(x: Tensor, p: Tensor) -> float:
    """‖P W‖_F/‖X W‖_F over the batch, W = I + σ₁ V_r S⁻¹ V_rᵀ. x, p float64 ``(B, N, d)``."""
    _, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    noise = 8 * torch.finfo(torch.float32).eps * torch.linalg.matrix_norm(x)
    inside = sigma > (noise * (x.shape[-2] ** -0.5 + x.shape[-1] ** -0.5))[..., None]
    weight = torch.where(inside, sigma[..., :1] / sigma, 0.0)

    def times_w(rows: Tensor) -> Tensor:
        turned: Tensor = rows + (rows @ vh.mT * weight[..., None, :]) @ vh
        return turned

    return float(times_w(p).norm() / times_w(x).norm())


def _parameter(module: nn.Module, path: str) -> Tensor:
    """A parameter, or the weight of an embedding, by its dotted path."""
    owner, _, name = path.rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    parameter: Tensor = value.weight if isinstance(value, nn.Embedding) else value
    return parameter
