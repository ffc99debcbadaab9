"""Controls: what conditioning changes besides the condition number, changed on its own.

X + C is larger than X, and with placement "input" it weighs the positions differently. An arm that does only
that shows how much of a gain is due to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attach import condition_, find_known, place_of
from wellcond.running import call_model, undisturbed
from wellcond.sites import Found, Site
from wellcond.table import TableConditioner
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


class ScaledTable(nn.Module):
    """x·‖E+C‖_F/‖E‖_F for rows x of an embedding table E: scope "table" without its condition number.

    The ratio is one number for the whole table, a constant of the step: no token sees another one.

    >>> table = nn.Embedding.from_pretrained(torch.diag(torch.tensor([3.0, 1.0])))
    >>> y = ScaledTable()(table.weight, table)
    >>> bool(torch.isclose(y.norm(), conditioned_tokens(table.weight).norm())), (y[0, 0] / y[1, 1]).item()
    (True, 3.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self.conditioner = TableConditioner()

    def forward(self, x: Tensor, table: nn.Embedding, ids: Tensor | None = None) -> Tensor:
        self.conditioner.refresh(table)
        with torch.autocast(x.device.type, enabled=False):
            return (x / self.conditioner.ratio).to(x.dtype)


@torch.no_grad()
def amplify_positions_(model: nn.Module, batch: Any) -> float:
    """Multiply the position embeddings once, so that they outweigh the content as conditioning lets them.

    With placement "input" X = T + P (tokens and positions), and X + C = X W with W = I + σ₁ V_r S⁻¹ V_rᵀ:
    conditioning turns T into T W and P into P W. The factor a solves ‖aP‖_F/‖T‖_F = ‖P W‖_F/‖T W‖_F, all taken over
    the whole batch. On a causal model conditioning is that of the table, T becomes T + C(T), and
    a = ‖T‖_F/‖T + C(T)‖_F. (Shares of ‖T + aP‖_F cannot always be met: where T and P cancel, ‖P W‖_F > ‖X W‖_F.)

    Args:
        model: a known model that adds to its tokens a parameter ``(1, N, d)``, or rows of an ``nn.Embedding``.
        batch: real inputs, what the model is called with.

    Returns:
        The factor a.

    Raises:
        ValueError: the model adds no positions in that way, or they are zero.
    """
    found = find_known(model)
    place, path = place_of(found, "input"), found.sites.positions
    if place.side != "output":
        raise ValueError(f"{type(found.module).__name__} receives its tokens with positions added already")
    parameter = None if path is None else _parameter(found.module, path)
    x, positions = _tokens_and_positions(model, batch, found, place)
    if parameter is None or positions is None:
        shape = None if parameter is None else tuple(parameter.shape)
        raise ValueError(
            f"the control 'positions' multiplies positions that are added to the tokens, a parameter (1, N, d) or rows "
            f"of a table; {type(found.module).__name__} has {shape} for tokens of shape {tuple(x.shape)}: leave this "
            f"arm out"
        )
    if not positions.any():
        raise ValueError(
            "the position embeddings are zero: no factor gives them a weight against the content"
        )
    content = x - positions
    if found.sites.causal:
        with condition_(model):
            conditioned = _outputs(model, batch, [place])[0]
        factor = float(content.norm() / (conditioned - positions).norm())
    else:
        factor = _ratio_of_gains(x, positions, content)
    parameter.mul_(factor)
    return factor


def _tokens_and_positions(
    model: nn.Module, batch: Any, found: Found, place: Site
) -> tuple[Tensor, Tensor | None]:
    """X and P ``(B, N, d)`` float64 of one forward; P is None unless X = T + P."""
    path, table = found.sites.positions, found.sites.table
    owner = None if path is None else _owner(found.module, path)
    if isinstance(owner, nn.Embedding) and path is not None and table is not None:
        places = [place, *(Site(inside).below(found.path) for inside in (table, path))]
        x, t, p = _outputs(model, batch, places)
        # Something else may happen to their sum, such as a normalisation.
        added = p.shape[-2:] == x.shape[-2:] and torch.allclose(t + p, x, rtol=1e-4, atol=1e-6)
        return x, p.expand_as(x) if added else None
    (x,) = _outputs(model, batch, [place])
    if not isinstance(owner, torch.Tensor) or owner.shape[-2:] != x.shape[-2:]:
        return x, None
    return x, owner.detach().double().expand_as(x)


def _outputs(model: nn.Module, batch: Any, places: Sequence[Site]) -> list[Tensor]:
    """What passes at these places in one forward, ``(..., N, d)`` float64."""
    kept: dict[int, Tensor] = {}

    def keeper(i: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            place = places[i]
            kept[i] = place.as_tokens(output if place.key is None else output[place.key]).double()

        return keep

    handles = [
        model.get_submodule(place.module).register_forward_hook(keeper(i)) for i, place in enumerate(places)
    ]
    try:
        with undisturbed(model):
            call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [kept[i] for i in range(len(places))]


def _ratio_of_gains(x: Tensor, p: Tensor, t: Tensor) -> float:
    """‖P W‖_F/‖P‖_F over ‖T W‖_F/‖T‖_F for the batch, W = I + σ₁ V_r S⁻¹ V_rᵀ of X. x, p, t float64 ``(B, N, d)``."""
    _, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    noise = 8 * torch.finfo(torch.float32).eps * torch.linalg.matrix_norm(x)
    inside = sigma > (noise * (x.shape[-2] ** -0.5 + x.shape[-1] ** -0.5))[..., None]
    weight = torch.where(inside, sigma[..., :1] / sigma, 0.0)

    def gain(rows: Tensor) -> float:
        turned = rows + (rows @ vh.mT * weight[..., None, :]) @ vh
        return float(turned.norm() / rows.norm())

    return gain(p) / gain(t)


def _owner(module: nn.Module, path: str) -> Any:
    """The parameter or the embedding at a dotted path."""
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _parameter(module: nn.Module, path: str) -> Tensor:
    """A parameter, or the weight of an embedding, by its dotted path."""
    value = _owner(module, path)
    parameter: Tensor = value.weight if isinstance(value, nn.Embedding) else value
    return parameter
