"""Spectra and the polar factor: the mathematics beneath every correction.

Tokens are X = U S Vᵀ (thin SVD, σ₁ ≥ σ₂ ≥ …) of shape ``(..., N, d)``: N tokens, d features.
``r`` is the numerical rank, ``U_r`` and ``V_r`` the first r columns of U and V, and the polar factor is
F = U_r V_rᵀ. How F is computed is the subject of `wellcond.decompositions`; here is what it is, and its derivative.

One policy for what is not finite, for every method: a matrix with a NaN or an infinity in a real row has
κ = κ⁺ = σ = NaN, rank −1 and a factor full of NaN. Its neighbours in the batch are not touched.
"""

from __future__ import annotations

import functools
import random
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from wellcond.decompositions import decompose, onto_range, tolerance
from wellcond.float64 import power_of_two, to_float64
from wellcond.newton import checked_newton, newton, newton_adjoint, rank_of
from wellcond.sharded import is_distributed, on_local_batch

Method = Literal["auto", "svd", "gram", "newton"]
NullSpace = Literal["range", "complete"]

NO_SECOND_DERIVATIVE = (
    "the polar factor has no second derivative here; use gradient='constant' where one is needed "
    "(gradient penalties, Hessians, torch.func.hessian)"
)

FILLED = 1e-5
"""What ``newton`` counts as the null space's part of the position code: float32 rounding leaves 1e-7 there."""

ROUNDING_SAFETY = 8.0
"""The rank tolerance in units of the rounding noise of the input (DESIGN, "Numerical rank")."""


class Spectrum(NamedTuple):
    """Extreme singular values and condition numbers of every matrix in a batch, each of shape ``(...)``."""

    sigma_max: Tensor
    sigma_min: Tensor
    rank: Tensor
    kappa: Tensor
    kappa_pinv: Tensor


class Polar(NamedTuple):
    """Polar factor ``(..., N, d)`` with the largest singular value and the numerical rank, both ``(...)``."""

    factor: Tensor
    sigma_max: Tensor
    rank: Tensor


# ---------------------------------------------------------------------------------------------- spectra


@torch.no_grad()
def spectrum(x: Tensor, mask: Tensor | None = None, rank_tol: float | None = None) -> Spectrum:
    """Singular values at both ends, numerical rank, κ and κ⁺ of every matrix in a batch.

    Definition 4.1 of the paper: κ(X) = σ_max/σ_min over the min(N, d) singular values, N counting real rows
    only. κ is ``inf`` for a rank-deficient matrix; κ⁺(X) = ‖X‖₂ ‖X⁺‖₂ = σ₁/σ_r is finite there.
    An empty matrix and the zero matrix have κ⁺ = 0; an empty one has κ = 0 too, as in ``torch.linalg.cond``.

    Args:
        x: real floating tokens ``(..., N, d)``.
        mask: ``(..., N)`` bool, True = a real token; other rows are not part of the matrix.
        rank_tol: singular values up to ``rank_tol``·σ₁ count as zero. Default: 8 times the rounding noise of
            the input, eps·‖X‖_F·(1/√N + 1/√d), eps of its dtype (of the autocast dtype under autocast).

    Returns:
        Spectrum of tensors ``(...)``; rank is int64, the others have the dtype of ``x``, at least float32.

    Raises:
        TypeError: ``x`` is not a real floating tensor, or ``mask`` is not bool.
        ValueError: ``x`` has fewer than two axes, ``mask`` does not fit, or ``rank_tol`` is outside [0, 1).

    >>> import torch
    >>> s = spectrum(torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    >>> round(s.kappa.item(), 4), s.rank.item()
    (3.0, 2)
    """
    if is_distributed(x):
        return Spectrum(*on_local_batch(lambda t, m: spectrum(t, m, rank_tol), x, mask))
    tokens = real_rows(x, mask, rank_tol)
    n, d = x.shape[-2:]
    out_dtype = torch.promote_types(x.dtype, torch.float32)
    if n == 0 or d == 0 or x.numel() == 0:
        zero = x.new_zeros(x.shape[:-2], dtype=out_dtype)
        return Spectrum(zero, zero.clone(), zero.long(), zero.clone(), zero.clone())

    n_real = _count_real(x, mask)
    noise = _relative_noise(x, n_real, d)  # before autocast is off: its dtype sets the rounding noise
    with torch.autocast(x.device.type, enabled=False):
        scale, bad = power_of_two(tokens)
        tokens = torch.where(bad[..., None, None], 0.0, to_float64(tokens, scale))
        sigma = torch.linalg.svdvals(tokens)
        sigma_max = sigma[..., 0]
        tol = tolerance(torch.linalg.matrix_norm(tokens), sigma_max, noise, rank_tol)
        count = n_real.clamp(max=d)
        inside = torch.arange(sigma.shape[-1], device=x.device) < count[..., None]
        rank = ((sigma > tol[..., None]) & inside).sum(-1)

        sigma_min = sigma.gather(-1, (count - 1).clamp(min=0)[..., None])[..., 0]
        sigma_r = sigma.gather(-1, (rank - 1).clamp(min=0)[..., None])[..., 0]
        kappa = torch.where(rank == count, sigma_max / sigma_min, torch.inf)
        kappa = torch.where(count == 0, 0.0, kappa)
        kappa_pinv = torch.where(rank > 0, sigma_max / sigma_r, 0.0)

        def finish(value: Tensor) -> Tensor:
            return torch.where(bad, torch.nan, value).to(out_dtype)

        return Spectrum(
            finish(torch.ldexp(sigma_max, scale)),
            finish(torch.ldexp(sigma_min, scale)),
            torch.where(bad, -1, rank),
            finish(kappa),
            finish(kappa_pinv),
        )


def condition_number(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """κ(X) = σ_max/σ_min of every matrix in a batch (Definition 4.1): ``(..., N, d) -> (...)``.

    ``inf`` when rank-deficient beyond rounding, ``nan`` when not finite. See `spectrum` for arguments and errors.

    >>> import torch
    >>> condition_number(torch.ones(2, 2))
    tensor(inf)
    """
    return spectrum(x, mask).kappa


# ----------------------------------------------------------------------------------------- polar factor


def polar(
    x: Tensor,
    mask: Tensor | None = None,
    method: Method = "auto",
    null_space: NullSpace = "range",
    rank_tol: float | None = None,
) -> Polar:
    """The polar factor F = U_r V_rᵀ of every matrix in a batch, differentiable in closed form.

    Args:
        x: real floating tokens ``(..., N, d)``, tall, wide or square.
        mask: ``(..., N)`` bool, True = a real token. Masked rows are outside X: their factor is zero.
        method: ``"svd"`` (reference), ``"gram"`` (float64 Gram matrix and ``eigh``), ``"newton"`` (matrix
            products only) or ``"auto"``, see `choose_method`. A method that cannot keep κ⁺(X+C) ≤ 2.002 on an
            input falls back to ``"svd"`` and warns once. Under ``torch.export`` ``"newton"`` is plain operators
            without that fallback; the others stay one operator of this library, which ONNX does not know.
        null_space: ``"range"`` leaves the null space alone. ``"complete"`` adds a partial isometry on it, so
            that the factor has min(N, d) singular values 1: the polar factor of (I−FFᵀ) E (I−FᵀF), where E
            is `position_code` over the real rows. It is the same for every method.
        rank_tol: see `spectrum`.

    Returns:
        Polar(factor, sigma_max, rank): factor in the dtype of ``x`` but at least float32.
        Gradients flow to ``factor`` and ``sigma_max``; a second derivative raises. Where σ₁ is repeated it
        has no derivative, and the mean over its singular vectors, a subgradient, is used.

    Raises:
        TypeError, ValueError: as `spectrum`; also for an unknown ``method`` or ``null_space``, and for a DTensor
            whose matrices are sharded.

    >>> import torch
    >>> factor, sigma_max, rank = polar(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
    >>> factor.round().tolist(), sigma_max.item(), rank.item()
    ([[0.0, 1.0], [1.0, 0.0]], 2.0, 2)
    """
    choose("method", method, Method)
    choose("null_space", null_space, NullSpace)
    if is_distributed(x):
        return Polar(*on_local_batch(lambda t, m: polar(t, m, method, null_space, rank_tol), x, mask))
    tokens = real_rows(x, mask, rank_tol)
    tokens = tokens.to(torch.promote_types(x.dtype, torch.float32))
    n, d = x.shape[-2:]
    batch = x.shape[:-2]
    if n == 0 or d == 0 or x.numel() == 0:
        # Sums over nothing, so that an empty shard takes part in a backward pass as the others do.
        rank = torch.zeros(batch, dtype=torch.long, device=x.device)
        return Polar(tokens.clone(), tokens.sum((-2, -1)), rank)

    n_real = _count_real(x, mask)
    noise = _relative_noise(x, n_real, d)
    unlimited = torch.full_like(n_real, min(n, d))
    tol = -1.0 if rank_tol is None else rank_tol
    with torch.autocast(x.device.type, enabled=False):
        factor, sigma_max, rank = _tall_polar(tokens, noise, unlimited, tol, method)
        if null_space == "complete":
            missing = torch.where(rank < 0, 0, n_real.clamp(max=d) - rank)
            code = _code_of_real_rows(tokens, mask)
            outside = code - factor @ (factor.mT @ code)
            outside = outside - (outside @ factor.mT) @ factor
            missing = missing.expand(batch)
            outside = torch.where((missing > 0)[..., None, None], outside, 0.0)
            filling = _tall_polar(outside, torch.zeros_like(noise), missing, FILLED, method, exact=True)[0]
            factor = factor + filling
        if mask is not None:  # a decomposition leaves rounding noise there
            factor = torch.where(mask[..., None], factor, 0.0)
    return Polar(factor, sigma_max, rank)


def choose_method(x: Tensor) -> tuple[str, str]:
    """What ``method="auto"`` means for ``x``, and why (measured by ``wellcond bench``).

    >>> import torch
    >>> choose_method(torch.ones(2, 3))[0]
    'gram'
    """
    if x.device.type != "cpu":
        return "newton", f"on {x.device.type} batched SVD and eigh run matrix by matrix or not at all"
    if x.dtype == torch.float64:
        return "svd", "a Gram matrix squares κ, and nothing wider than float64 is there to hold it"
    return "gram", "on a CPU a float64 Gram matrix and eigh beat the SVD at every shape measured"


def _tall_polar(
    x: Tensor, noise: Tensor, max_rank: Tensor, rank_tol: float, method: str, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`polar` in either orientation: the work is always done on the small side.

    ``exact``: the rank is known to be ``max_rank``, however small a singular value.
    """
    wide = x.shape[-2] < x.shape[-1]
    tall = x.mT if wide else x
    method = choose_method(x)[0] if method == "auto" else method
    if method == "newton" and torch.compiler.is_exporting():
        found = newton(tall, noise, rank_tol)
        factor, sigma_max, rank = found.factor, found.sigma_max, rank_of(found.factor)
    elif method == "newton":
        factor, sigma_max, rank = _NewtonFactor.apply(tall, noise, max_rank, rank_tol, exact)
    else:
        vectors = x.requires_grad and torch.is_grad_enabled()
        if exact:
            method, rank_tol = "svd", 0.0
        factor, sigma_max, rank, _, _ = _PolarFactor.apply(tall, noise, max_rank, rank_tol, method, vectors)
    return (factor.mT if wide else factor), sigma_max, rank


class _PolarFactor(torch.autograd.Function):
    """F(X) = U_r V_rᵀ and σ₁(X) for tall X ``(..., N, d)``, N ≥ d, with their derivatives in closed form.

    With the rank constant (Higham, Functions of Matrices, 2008, theorem 8.9 for the full-rank case):

        dF = U_r (W − Wᵀ)∘1/(σ_i+σ_j) V_rᵀ + (I−U_rU_rᵀ) dX V_r S⁻¹ V_rᵀ + U_r S⁻¹ U_rᵀ dX (I−V_rV_rᵀ),
        W = U_rᵀ dX V_r,      dσ₁ = u₁ᵀ dX v₁.

    No 1/(σ_i²−σ_j²) appears: repeated singular values are harmless, unlike in the derivative of an SVD.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, noise: Tensor, max_rank: Tensor, rank_tol: float, method: str, vectors: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        factor, sigma_max, rank, v, sigma = decompose(x, noise, max_rank, rank_tol, method, vectors)
        return factor, sigma_max, rank, v, sigma

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, rank, v, sigma = output
        ctx.mark_non_differentiable(rank, v, sigma)
        ctx.save_for_backward(inputs[0], v, sigma, inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, v, sigma, noise = ctx.saved_tensors
        grad = _PolarBackward.apply(x, v, sigma, noise, grads[0], grads[1])
        return grad, None, None, None, None, None


class _PolarBackward(torch.autograd.Function):
    """A function of its own so that a second derivative raises: X is an argument only to carry that error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, v: Tensor, sigma: Tensor, noise: Tensor, g: Tensor, g_sigma: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            grad = polar_adjoint(x.to(v.dtype), v, sigma, noise, g.to(v.dtype), g_sigma.to(v.dtype))
        return grad.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


class _NewtonFactor(torch.autograd.Function):
    """The same F and σ₁ by ``newton``: forward and backward in matrix products alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, noise: Tensor, max_rank: Tensor, rank_tol: float, exact: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        factor, sigma_max, rank = checked_newton(x, noise, max_rank, rank_tol, exact)
        return factor, sigma_max, rank

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.rank_tol = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, noise = ctx.saved_tensors
        return _NewtonBackward.apply(x, noise, ctx.rank_tol, grads[0], grads[1]), None, None, None, None


class _NewtonBackward(torch.autograd.Function):
    """As `_PolarBackward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, noise: Tensor, rank_tol: float, g: Tensor, g_sigma: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return newton_adjoint(x, noise, rank_tol, g.to(x.dtype), g_sigma.to(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


def polar_adjoint(x: Tensor, v: Tensor, sigma: Tensor, noise: Tensor, g: Tensor, g_sigma: Tensor) -> Tensor:
    """The adjoint of dF and dσ₁ above. x, g ``(..., N, d)``; v ``(..., d, d)``; sigma ``(..., d)``, 0 beyond r."""
    inside = (sigma > 0).to(v.dtype)
    inverse = torch.where(sigma > 0, 1 / sigma, 0.0)
    pair_sum = sigma[..., :, None] + sigma[..., None, :]
    both = inside[..., :, None] * inside[..., None, :]

    shrunk = (v * inverse[..., None, :]) @ v.mT
    f = x @ shrunk
    fg = f.mT @ g
    a = v.mT @ fg @ v
    turned = v @ ((a - a.mT) * both / torch.where(both > 0, pair_sum, 1.0)) @ v.mT
    fro = sigma.square().sum(-1, keepdim=True).sqrt()
    top = ((sigma >= sigma[..., :1] - noise[..., None] * fro) & (sigma > 0)).to(v.dtype)
    top = top / top.sum(-1, keepdim=True).clamp(min=1)
    leading = (v * top[..., None, :]) @ v.mT

    return (
        f @ (turned + shrunk @ (fg - fg @ onto_range(v, sigma)) + g_sigma[..., None, None] * leading)
        + (g - f @ fg) @ shrunk
    )


# --------------------------------------------------------------------------------------- fixed positions


def position_code(n: int, d: int) -> Tensor:
    """Q ``(n, d)`` float64: rows of stacked d×d orthogonal matrices, the same row for a position at every n.

    QᵀQ is a multiple of I whenever d divides n, QQᵀ = I for n ≤ d, and κ(Q) ≤ √2 in between and beyond.
    Block b is the orthogonal factor (R with positive diagonal) of a d×d matrix of ``random.Random(b)``
    numbers, uniform in [−1, 1): a sequence that Python keeps across versions and machines.

    >>> q = position_code(3, 8)
    >>> bool((q @ q.mT - torch.eye(3, dtype=q.dtype)).abs().max() < 1e-12)
    True
    """
    if n == 0 or d == 0:
        return torch.zeros(n, d, dtype=torch.float64)
    return torch.cat([_orthogonal_block(b, d) for b in range(-(-n // d))])[:n]


@functools.lru_cache(maxsize=16)
def _orthogonal_block(b: int, d: int) -> Tensor:
    uniform = random.Random(b)
    entries = torch.tensor([uniform.random() for _ in range(d * d)], dtype=torch.float64)
    q, r = torch.linalg.qr(2 * entries.reshape(d, d) - 1)
    block: Tensor = q * r.diagonal().sign()
    return block


def _code_of_real_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """`position_code` numbered along the real rows only, so that padding changes nothing: ``(..., N, d)``."""
    code = position_code(*x.shape[-2:]).to(x.device, x.dtype)
    if mask is None:
        return code.expand(x.shape)
    index = (mask.cumsum(-1) - 1).clamp(min=0)
    return torch.where(mask[..., None], code[index], 0.0)


# --------------------------------------------------------------------------------------- what both need


def real_rows(x: Tensor, mask: Tensor | None, rank_tol: float | None = None) -> Tensor:
    """X with masked rows set to zero, which leaves its non-zero singular values alone. Checks the arguments."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"tokens must be a real floating tensor (..., N, d), got {kind}; convert with .float()"
        )
    if x.ndim < 2:
        raise ValueError(f"tokens need at least two axes (..., N, d), got shape {tuple(x.shape)}")
    if rank_tol is not None and not 0.0 <= rank_tol < 1.0:
        raise ValueError(f"rank_tol is a share of σ₁ in [0, 1), got {rank_tol}")
    if mask is None:
        return x
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool with True = a real token, got {mask.dtype}; use mask.bool()")
    if mask.shape != x.shape[:-1]:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, tokens {tuple(x.shape)} need {tuple(x.shape[:-1])}; "
            f"expand it over the batch first"
        )
    return torch.where(mask[..., None], x, 0.0)


def choose(name: str, value: str, options: Any) -> None:
    """Raise unless ``value`` is one of the values of the Literal type ``options``."""
    allowed = get_args(options)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _count_real(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        return mask.sum(-1)
    return torch.full(x.shape[:-2], x.shape[-2], dtype=torch.long, device=x.device)


def _relative_noise(x: Tensor, n_real: Tensor, d: int) -> Tensor:
    """8·eps·(1/√N + 1/√d): the default rank tolerance relative to ‖X‖_F, float64 ``(...)``."""
    eps = torch.finfo(x.dtype).eps
    if torch.is_autocast_enabled(x.device.type):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(x.device.type)).eps)
    noise: Tensor = ROUNDING_SAFETY * eps * (n_real.clamp(min=1).double().rsqrt() + max(d, 1) ** -0.5)
    return noise
