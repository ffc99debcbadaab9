"""Scope "static" (ours, not the paper's): X + λQ, a fixed code of the position with λ = strength·σ₁.

Q holds rows of stacked d×d orthogonal matrices (`wellcond.linalg.position_code`), the same row for a position at
every length. By Weyl's inequality κ(X + λQ) ≤ (λσ_max(Q) + σ₁(X))/(λσ_min(Q) − σ₁(X)) where the denominator is
positive. σ₁ is measured once, by `calibrate_`. Nothing depends on other tokens: no leak, and under a cache the row of
a token is that of its position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.config import ConditioningConfig
from wellcond.hooks import TokenHook, drop_compiled_code, token_hooks
from wellcond.linalg import position_code, spectrum
from wellcond.running import call_model, undisturbed


@torch.library.custom_op("wellcond::position_rows", mutates_args=())
def position_rows(like: Tensor, rows: Tensor | None, n: int, d: int) -> Tensor:
    """Rows of Q in the dtype (at least float32) and on the device of ``like``.

    ``rows`` ``(..., n)`` are positions, with a row of zeros for those below 0; None stands for 0, …, n−1. An operator
    of its own, so that the making of Q, which is plain Python, survives ``torch.compile``.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if rows is None:
        return code_blocks(-(-n // max(d, 1)), d, dtype, like.device)[:n].clone()
    last = int(rows.max()) if rows.numel() else -1
    code = code_blocks(last // max(d, 1) + 1, d, dtype, like.device)
    if last < 0:
        return code.new_zeros(*rows.shape, d)
    rows = rows.to(like.device)
    return code[rows.clamp(min=0)] * (rows >= 0)[..., None]


@position_rows.register_fake
def _(like: Tensor, rows: Tensor | None, n: int, d: int) -> Tensor:
    shape = (n, d) if rows is None else (*rows.shape, d)
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))


@functools.lru_cache(maxsize=8)
def code_blocks(blocks: int, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first ``blocks``·d rows of Q: made once, since every forward needs them."""
    with torch.inference_mode(False):
        return position_code(blocks * d, d).to(device, dtype)


class PositionCode(nn.Module):
    """X + λQ: ``forward(x, rows=None)``, without parameters or buffers.

    Args:
        config: ``strength`` and ``sigma``; λ is their product.

    >>> import torch
    >>> code = PositionCode(ConditioningConfig(scope="static", sigma=2.0))
    >>> y = code(torch.zeros(3, 4))
    >>> (y @ y.mT).round(decimals=4).diagonal()
    tensor([4., 4., 4.])
    """

    def __init__(self, config: ConditioningConfig) -> None:
        super().__init__()
        if config.rescale != "none":
            raise ValueError(
                f"scope='static' has no rescale={config.rescale!r}: the norm of a sequence depends on all its "
                f"tokens, the fixed correction on none; use rescale='none' and a smaller strength"
            )
        self.config = config

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """``x`` ``(..., N, d)``; ``rows`` ``(..., N)`` int64 positions, −1 for none; None: 0, …, N−1."""
        if self.config.sigma is None:
            raise RuntimeError(
                "scope='static' needs σ₁ of the tokens: call wellcond.calibrate_(model, batches) once on real "
                "batches (or set sigma= in the configuration) before the first forward"
            )
        strength = self.config.strength * self.config.sigma
        with torch.autocast(x.device.type, enabled=False):
            n, d = x.shape[-2:]
            conditioned: Tensor = x + strength * position_rows(x.detach(), rows, n, d)
            return conditioned.to(x.dtype)

    def extra_repr(self) -> str:
        return f"strength={self.config.strength}, sigma={self.config.sigma}"


class StaticHook(TokenHook):
    """Adds λQ in the rows of the positions that the model gives its tokens.

    Attributes:
        observed: while calibrating, σ₁ of every matrix of tokens that passed; None otherwise.
    """

    observed: list[float] | None = None

    def condition(self, tokens: Tensor, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        if self.observed is not None:
            mask = self.mask_of(tokens)
            self.observed += spectrum(tokens, mask).sigma_max.flatten().tolist()
            return tokens
        conditioned: Tensor = self.transform(tokens, self.rows_of(tokens))
        return conditioned

    def rows_of(self, tokens: Tensor) -> Tensor | None:
        """The positions of this call: what the model itself says, else the real tokens counted."""
        if self.known is not None and self.known.rows is not None:
            return self.known.rows(self.call(), tokens.shape[-2])
        mask = self.mask_of(tokens)
        if mask is None:
            return None
        return mask.cumsum(-1) * mask - 1


def calibrate_(model: nn.Module, batches: Iterable[Any]) -> float:
    """Measure σ₁ of the tokens on real batches and set λ = strength·σ₁ of a model conditioned with scope "static".

    Runs the model without the correction, in eval mode, without gradients, its random state untouched. σ₁ is the
    largest over all samples, so that the bound of Weyl's inequality holds for each of them. Calling it again
    measures again. With several processes, each must be given the same batches, or their λ will differ.

    Args:
        model: a model attached with ``ConditioningConfig(scope="static")``.
        batches: what the model is called with, each a tensor, a tuple or a mapping; a few are enough.

    Returns:
        σ₁, also in ``handle.config.sigma`` and in what `save_config` writes.

    Raises:
        ValueError: the model is not conditioned with scope "static", there is no batch, or the tokens are zero or
            not finite.

    >>> import torch, wellcond
    >>> model = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    >>> handle = wellcond.condition_(model, ConditioningConfig(scope="static", strength=3.0), site="0")
    >>> calibrate_(model, [torch.eye(4)[None]]), handle.config.sigma
    (1.0, 1.0)
    """
    hooks = [hook for hook in token_hooks(model) if isinstance(hook, StaticHook)]
    if len(hooks) != 1:
        raise ValueError(
            f"this {type(model).__name__} has {len(hooks)} static corrections; first call "
            f"wellcond.condition_(model, ConditioningConfig(scope='static'))"
        )
    hook = hooks[0]
    hook.observed = []
    try:
        with undisturbed(model):
            for batch in batches:
                call_model(model, batch)
        found = torch.tensor(hook.observed, dtype=torch.float64)
    finally:
        del hook.observed
    if not found.numel():
        raise ValueError("no batch reached the tokens: calibrate_ needs at least one batch")
    sigma = found.max().item()
    if not 0.0 < sigma < float("inf"):
        raise ValueError(
            f"σ₁ of the tokens is {sigma}: zero or not finite tokens cannot calibrate a correction"
        )
    set_sigma(hook, sigma)
    return sigma


def set_sigma(hook: StaticHook, sigma: float) -> None:
    """Use σ₁ from now on, also in compiled code and in the checkpoint's memory."""
    assert hook.config is not None
    hook.config = dataclasses.replace(hook.config, sigma=sigma)
    hook.transform = PositionCode(hook.config)
    hook.remember()
    drop_compiled_code()
