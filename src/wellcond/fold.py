"""fold_: a correction that is a function of the weights alone becomes part of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellcond.attach import find_known, is_below, remove_
from wellcond.hooks import TokenHook, token_hooks
from wellcond.linalg import position_code
from wellcond.memory import pretrained_config
from wellcond.table import row_operator


def fold_(model: nn.Module) -> nn.Module:
    """Bake a table or static correction into the weights, for inference, and take the conditioning off.

    Scope "table": the embedding table E becomes E + C(E). Weights tied to it (``lm_head``) keep E: they are untied,
    ``config.tie_word_embeddings`` becomes False, and a warning says so. Scope "static": the position embedding gets
    λQ added. Outputs stay equal to rounding, the state-dict keys stay, and the folded model needs no wellcond.
    An optimizer that holds the old parameters does not know the new ones: fold after training.

    Args:
        model: conditioned with scope "table", or "static" and calibrated.

    Returns:
        ``model``.

    Raises:
        ValueError: it is not conditioned; the scope is "sample"; or, for "static", the model has no position
            embedding that is merely added to the tokens at that placement, or is not calibrated.

    >>> import wellcond
    >>> model = nn.Sequential(nn.Embedding.from_pretrained(torch.diag(torch.tensor([4.0, 1.0]))))
    >>> _ = wellcond.condition_(model, wellcond.ConditioningConfig(scope="table"), site="0")
    >>> fold_(model)[0].weight.tolist(), wellcond.is_conditioned(model)
    ([[8.0, 0.0], [0.0, 5.0]], False)
    """
    hooks = [hook for hook in token_hooks(model) if hook.config is not None]
    if len(hooks) != 1:
        raise ValueError(
            f"this {type(model).__name__} has {len(hooks)} corrections to fold; call condition_ first"
        )
    hook = hooks[0]
    assert hook.config is not None
    fold = FOLDS.get(hook.config.scope or "sample")
    if fold is None:
        raise ValueError(
            f"scope={hook.config.scope!r} computes its correction from each input; only scope='table' and "
            f"scope='static' are functions of the weights that can be folded into them"
        )
    with torch.no_grad():
        fold(model, hook)
    remove_(model)
    return model


def fold_table(model: nn.Module, hook: TokenHook) -> None:
    """E + C(E) in place of E."""
    config = hook.config
    assert config is not None
    path, table = next((path, module) for path, module in model.named_modules() if holds(module, hook))
    assert isinstance(table, nn.Embedding)
    found = row_operator(
        table.weight, method=config.method, null_space=config.null_space, rank_tol=config.rank_tol
    )
    e = table.weight.double()
    ratio = found.frobenius_ratio if config.rescale == "frobenius" else 1.0
    conditioned = (ratio * (e + e @ found.matrix)).to(table.weight.dtype)
    old = table.weight
    table.weight = nn.Parameter(conditioned, requires_grad=old.requires_grad)
    untie(model, path, old)


def holds(module: nn.Module, hook: TokenHook) -> bool:
    """Whether a hook sits on the output of this module."""
    return any(getattr(entry, "__self__", None) is hook for entry in module._forward_hooks.values())


def untie(model: nn.Module, path: str, old: Tensor) -> None:
    """Tell the configurations that what shared ``old`` with the embedding at ``path`` no longer does."""
    sharers = [
        (f"{name}.{key}", module, key)
        for name, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is old
    ]
    if not sharers:
        return
    for _, module, key in sharers[
        1:
    ]:  # untied in the configuration, each must be saved and loaded on its own
        module._parameters[key] = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    for name, module in model.named_modules():
        config = pretrained_config(module)
        if is_below(path, name) and getattr(config, "tie_word_embeddings", None):
            config.tie_word_embeddings = False  # type: ignore[union-attr]
    warnings.warn(
        f"folding the table into {path!r} untied it from {[name for name, _, _ in sharers]}, which keep the table "
        f"without the correction: the checkpoint grows by {len(sharers)} × {tuple(old.shape)}",
        stacklevel=4,
    )


def fold_static(model: nn.Module, hook: TokenHook) -> None:
    """The position embedding plus λQ."""
    config = hook.config
    assert config is not None
    found = find_known(model) if hook.memory is not None and hook.memory.known else None
    name = "this model" if found is None else type(found.module).__name__
    start = None if found is None else found.sites.folds.get(config.placement)
    if found is None or start is None or found.sites.positions is None:
        other = [] if found is None else sorted(found.sites.folds)
        raise ValueError(
            f"{name} has no position embedding that is only added to the tokens at placement={config.placement!r}, "
            f"so the fixed correction cannot be folded into it"
            + (f"; it can at placement={other}" if other else "; keep it attached")
        )
    if config.sigma is None:
        raise ValueError(
            "this static correction has no σ₁ yet: call wellcond.calibrate_(model, batches) first"
        )
    table = position_table(found.module, found.sites.positions)
    rows = table.view(-1, table.shape[-1])[start:]
    rows += (config.strength * config.sigma * position_code(*rows.shape)).to(rows.device, rows.dtype)


def position_table(model: nn.Module, path: str) -> Tensor:
    """The parameter at a path, or the weight of the embedding there."""
    owner, _, last = path.rpartition(".")
    place: Any = getattr(model.get_submodule(owner), last)
    return cast(Tensor, place.weight if isinstance(place, nn.Module) else place)


FOLDS: dict[str, Callable[[nn.Module, TokenHook], None]] = {"table": fold_table, "static": fold_static}
