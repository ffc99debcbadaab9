"""Decompositions of a tall matrix: ``svd`` (the reference) and ``gram`` (a symmetric eigenproblem).

Both give F = U_r V_rᵀ with V and σ of X = U S Vᵀ, X ``(..., N, d)`` with N ≥ d. `wellcond::decompose` is
one opaque operator around them, so that checks and fallbacks, which look at values, survive ``torch.compile``,
``vmap`` and autograd.

Precision of ``gram``. XᵀX squares κ, so it is formed in float64 (2e-16·κ² is 2e-4 at κ = 1e6), which costs
two float32 products, or one where numpy leaves the lower half out. Small directions are polished where the check
asks for it, and very small ones found again from X itself, projected on them. F = X V_r S⁻¹ V_rᵀ is formed in
float32 where κ⁺ allows it, else in float64.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from wellcond.float64 import (
    apply,
    eigh,
    gram_matrix,
    power_of_two,
    product,
    symmetric_square,
    to_float64,
)
from wellcond.parallel import for_each, large_sample, parts_of

DECOMPOSITION_NOISE = 16.0 * torch.finfo(torch.float64).eps
"""Singular values below this share of σ₁ are noise of a float64 decomposition, whatever the input's dtype."""

GRAM_NOISE = (8.0 * torch.finfo(torch.float64).eps) ** 0.5
"""The same after squaring: XᵀX in float64 carries no singular value below this share of σ₁."""

DROWNED = {torch.float32: 3e-7, torch.float64: 1e-5}
"""Below this share of σ₁ a singular vector of XᵀX in float64 (error 7e-16·κ²) is not good enough for the dtype of
the input: it is found again from X itself. A float32 SVD has lost it to 6e-8·κ long before."""

UNPOLISHED = 5e-6
"""Where a factor does not pass, one Newton-Schulz step squares the error of the directions below this share of σ₁,
which is 3e-5 and more."""

KEPT_APART = 1e-4
"""What is projected out for that: directions above this share of σ₁, which XᵀX knows to 1e-7."""

FLOAT32_KAPPA = 1.5e3
"""κ⁺ up to which F = X V_r S⁻¹ V_rᵀ is formed in float32: its rounding error is about 6e-8·κ⁺."""

FLOAT32_FULL = 1.4e4
"""The same for κ·√d at full rank, where ‖(FᵀF − 1)z‖ below was 4e-9 to 2.1e-8 times κ·√d (d from 64 to 768), and a
factor that fails is formed twice."""

ISOMETRY_ERROR = 3e-4
"""Largest ‖(FᵀF − V_r V_rᵀ)z‖ over the Gaussian probes z that passes.

With E = FᵀF − V_r V_rᵀ a factor keeps κ⁺(X+C) ≤ 2.002 up to ‖E‖₂ = 1.3e-3. If E has one direction, ‖Ez‖ stays
below 0.23‖E‖₂ with probability 0.18 for one Gaussian z and 1e-6 for all eight; if it has more, with less.
FᵀX needs no check of its own in ``gram``: F = X·P with P = V diag(≥ 0) Vᵀ positive semidefinite whatever
`eigh` returned, and then PXᵀXP = V_r V_rᵀ makes FᵀX = P·XᵀX the (semidefinite) inverse of P on the range."""

PROBES = 8

KNOWN_KAPPA = 1e5
"""κ⁺ up to which PXᵀXP stands for FᵀF where both products with X were in float64: they are wrong by 3e-16·κ², 3e-6."""


# ---------------------------------------------------------------------------------------- the operator


@torch.library.custom_op("wellcond::decompose", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def decompose(
    x: Tensor, noise: Tensor, max_rank: Tensor, rank_tol: float, method: str, vectors: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """F, σ₁, r, V and σ of tall X ``(..., N, d)``, float32 or float64; σ is 0 beyond the rank.

    ``noise`` ``(...)`` is the rounding noise relative to ‖X‖_F; ``rank_tol`` < 0 means "use it". ``max_rank``
    ``(...)`` keeps only the largest directions. V comes back empty unless ``vectors``.
    """
    batch, (n, d) = x.shape[:-2], x.shape[-2:]
    count = batch.numel()
    flat, flat_noise, flat_rank = x.reshape(count, n, d), noise.reshape(count), max_rank.reshape(count)
    tol = None if rank_tol < 0 else rank_tol
    factor = torch.empty_like(flat, memory_format=torch.contiguous_format)
    sigma = x.new_empty((count, d), dtype=torch.float64)
    v = x.new_empty((count, d, d) if vectors else (count, 0, 0), dtype=torch.float64)
    work = DECOMPOSITIONS[method]

    def do(part: slice) -> int:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            v_part, sigma_part, failed = work(flat[part], flat_noise[part], tol, factor[part])
            kept = torch.arange(d, device=x.device) < flat_rank[part, None]
            if not kept.all():
                sigma_part = sigma_part * kept
                factor[part] = factor[part].double() @ onto_range(v_part, sigma_part)
            sigma[part] = sigma_part
            if vectors:
                v[part] = v_part
            return failed

    flops = count * d * d * (n + 9 * d)
    with full_precision():
        failed = sum(for_each(do, parts_of(flat, flops, TOGETHER[method]), x.device, flops))
    if failed:
        warn_fallback(method, failed, count, (n, d))
    bad = sigma[:, 0].isnan()
    return (
        factor.view(x.shape),
        sigma[:, 0].to(x.dtype, copy=True).reshape(batch),
        torch.where(bad, -1, (sigma > 0).sum(-1)).reshape(batch),
        v.view(*batch, *v.shape[1:]),
        sigma.view(*batch, d),
    )


@decompose.register_fake
def _(
    x: Tensor, noise: Tensor, max_rank: Tensor, rank_tol: float, method: str, vectors: bool
) -> tuple[Tensor, ...]:
    batch, d = x.shape[:-2], x.shape[-1]
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(batch),
        x.new_empty(batch, dtype=torch.long),
        x.new_empty((*batch, d, d) if vectors else (*batch, 0, 0), dtype=torch.float64),
        x.new_empty((*batch, d), dtype=torch.float64),
    )


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """float32 products in float32: TF32 and bfloat16, where the user allowed them, wait outside."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    mkldnn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    lowered = [(b, b.fp32_precision) for b in backends if b.fp32_precision not in ("none", "ieee")]
    try:
        for backend, _ in lowered:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in lowered:
            backend.fp32_precision = precision


def batched_vmap(operator: Any) -> Callable[..., tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """The vmap rule of an operator that takes any leading axes: the mapped one becomes the first of them."""

    def rule(
        info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def lead(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        outputs = operator(*(lead(value, dim) for value, dim in zip(args, in_dims, strict=True)))
        return outputs, (0,) * len(outputs)

    return rule


decompose.register_vmap(batched_vmap(decompose))


# ------------------------------------------------------------------------------------------ the methods


def svd_polar(x: Tensor, noise: Tensor, rank_tol: float | None, out: Tensor) -> tuple[Tensor, Tensor, int]:
    """The reference: F = U_r V_rᵀ from the thin SVD in float64. x ``(b, N, d)``, N ≥ d.

    Writes F to ``out``; returns V, σ and the number of samples that failed (none).
    """
    scale, bad = power_of_two(x)
    x64 = to_float64(x, scale).masked_fill(bad[:, None, None], 0.0)
    u, sigma, vh = torch.linalg.svd(x64, full_matrices=False)
    inside = sigma > tolerance(torch.linalg.matrix_norm(x64), sigma[:, 0], noise, rank_tol)[:, None]
    out.copy_((u * inside[:, None, :]) @ vh)
    return vh.mT, unscale(sigma * inside, scale, bad, out), 0


def gram_polar(x: Tensor, noise: Tensor, rank_tol: float | None, out: Tensor) -> tuple[Tensor, Tensor, int]:
    """F = X V_r S⁻¹ V_rᵀ from XᵀX = V S² Vᵀ in float64. x ``(b, N, d)``, N ≥ d.

    Writes F to ``out``; returns V, σ and the number of samples that failed the check, done again by `svd_polar`.
    """
    scale, bad = (
        power_of_two(x) if x.dtype == torch.float64 else (None, None)
    )  # float32 squares fit in float64
    gram = gram_matrix(x, scale)
    squares = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    bad = ~squares.isfinite() if bad is None else bad
    if bad.any():
        gram, squares = gram.masked_fill(bad[:, None, None], 0.0), squares.masked_fill(bad, 0.0)
    eigenvalues, v = eigh(gram)
    sigma, v = eigenvalues.flip(-1).clamp_(min=0).sqrt_(), v.flip(-1)
    tol = tolerance(squares.sqrt(), sigma[:, 0], noise, rank_tol)
    for i in drowned(sigma, tol, DROWNED[x.dtype]).nonzero().flatten().tolist():
        sigma[i], v[i] = resolve_small(
            x[i : i + 1], None if scale is None else scale[i : i + 1], sigma[i], v[i]
        )

    sigma = sigma * (sigma > tol[:, None])
    failed = ~(form_factor(x, scale, gram, v, sigma, out) | bad)
    sigma = unscale(sigma, scale, bad, out)
    if failed.any():
        replacement = torch.empty_like(out[failed])
        v[failed], sigma[failed], _ = svd_polar(x[failed], noise[failed], rank_tol, replacement)
        out[failed] = replacement
    return v, sigma, int(failed.sum())


def form_factor(
    x: Tensor, scale: Tensor | None, gram: Tensor, v: Tensor, sigma: Tensor, out: Tensor
) -> Tensor:
    """Writes X V_r S⁻¹ V_rᵀ to ``out``; returns where it passes the check, bool ``(b,)``. σ is 0 beyond the rank."""
    inside = sigma > 0
    inverse = torch.where(inside, 1 / sigma, 0.0)
    probes = gaussian_probes(x.shape[-1], x.device)
    expected = product(product(probes.mT, v) * inside[:, None, :], v.mT)

    def as_expected(found: Tensor) -> Tensor:
        error: Tensor = torch.linalg.vector_norm(found - expected, dim=-1).amax(-1)
        return error <= ISOMETRY_ERROR

    def isometric() -> Tensor:
        return as_expected((probes.mT.to(out.dtype) @ out.mT) @ out)

    good = float32_suffices(sigma, inverse, inside) & (large_sample(x) and x.dtype == torch.float32)
    if good.any():
        for i in good.nonzero().flatten().tolist():
            rank = int(inside[i].sum())
            apply_float32(x[i], v[i][:, :rank], inverse[i][:rank], out[i])
        good &= isometric()
    if good.all():
        return good
    inverse_root = symmetric_square(v * inverse.sqrt()[:, None, :])  # V_r S⁻¹ V_rᵀ
    if not good.any():
        apply(x, scale, inverse_root, out)
    else:
        for i in (~good).nonzero().flatten().tolist():
            apply(x[i : i + 1], None, inverse_root[i : i + 1], out[i : i + 1])
    known = sigma[:, 0] * inverse.amax(-1) <= KNOWN_KAPPA
    good |= known & as_expected(product(product(product(probes.mT, inverse_root), gram), inverse_root))
    if not good.all():
        good |= isometric()
    if not good.all():
        polish(out, v, inside & (sigma < UNPOLISHED * sigma[:, :1]) & ~good[:, None])
        good |= isometric()
    return good


def float32_suffices(sigma: Tensor, inverse: Tensor, inside: Tensor) -> Tensor:
    """Where X V_r S⁻¹ V_rᵀ may be formed in float32: κ⁺ moderate, and no entry near the ends of its range."""
    largest, steepest = sigma.amax(-1), inverse.amax(-1)
    at_full_rank = min(FLOAT32_KAPPA, FLOAT32_FULL / sigma.shape[-1] ** 0.5)
    limit = torch.where(inside.all(-1), at_full_rank, FLOAT32_KAPPA)
    return (largest * steepest <= limit) & (largest < 1e30) & (steepest < 1e30)


def apply_float32(x: Tensor, v: Tensor, inverse: Tensor, out: Tensor) -> None:
    """``out`` = X V_r S⁻¹ V_rᵀ of one matrix. x, out ``(N, d)`` float32; v ``(d, r)`` and inverse ``(r,)`` float64.

    Where the rank is short, U_r = X V_r S⁻¹ comes first: its error is then turned into the range by V_rᵀ, and X + C has
    no directions above the rounding noise of its entries. X·(V_r S⁻¹ V_rᵀ) would have them. U_r is smaller than X, so
    a Newton-Schulz step on it, U(3I − UᵀU)/2, is cheap: an error e of orthonormality becomes e².
    """
    if v.shape[-1] == x.shape[-1]:
        torch.mm(x, symmetric_square((v * inverse.sqrt()).float()), out=out)
    else:
        u, turn = x @ (v * inverse).float(), v.mT.float()
        torch.mm(u, 1.5 * turn - 0.5 * (u.mT @ u) @ turn, out=out)


def polish(factor: Tensor, v: Tensor, chosen: Tensor) -> None:
    """One Newton-Schulz step, F(3I − FᵀF)/2, on the ``chosen`` ``(b, d)`` columns of V: an error e becomes e²."""
    for i in chosen.any(-1).nonzero().flatten().tolist():
        basis = v[i][:, chosen[i]].mT.to(factor.dtype)
        part = basis @ factor[i].mT  # as rows: a few columns would be multiplied slowly
        error = part @ part.mT
        error.diagonal().sub_(1)
        factor[i].addmm_(part.mT, error @ basis, alpha=-0.5)


def drowned(sigma: Tensor, tol: Tensor, share: float) -> Tensor:
    """Which matrices have a direction that counts, or may count, and that XᵀX does not know well: bool ``(b,)``."""
    sigma_max = sigma[..., :1]
    may_count = sigma > tol[..., None] / 2
    unknown = (tol < 2 * GRAM_NOISE * sigma_max[..., 0])[..., None]
    return cast(Tensor, ((may_count | unknown) & (sigma < share * sigma_max)).any(-1))


def resolve_small(x: Tensor, scale: Tensor | None, sigma: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """σ ``(d,)`` and V ``(d, d)`` of one matrix again, small directions from the Gram matrix of X projected on them.

    Beside directions of size 1 XᵀX carries an error 2e-16; without those above 1e-4 it carries 2e-24.
    """
    large = int((sigma >= KEPT_APART * sigma[0]).sum())
    eigenvalues, turn = eigh(gram_matrix(x, scale, v[:, large:])[0])
    small = eigenvalues.flip(-1).clamp(min=0).sqrt()
    return torch.cat([sigma[:large], small]), torch.cat([v[:, :large], v[:, large:] @ turn.flip(-1)], dim=-1)


DECOMPOSITIONS: dict[str, Callable[[Tensor, Tensor, float | None, Tensor], tuple[Tensor, Tensor, int]]] = {
    "svd": svd_polar,
    "gram": gram_polar,
}


TOGETHER = {"svd": 1, "gram": 8}
"""Samples worked on by one thread at a time. Threads share Python's lock and wait for each other at every call, so that
fewer calls are faster; ``svd`` would hold float64 copies of all of them."""


def warn_fallback(method: str, failed: int, total: int, shape: tuple[int, int]) -> None:
    """One warning per process and place (Python's default filter shows a repeated text once)."""
    warnings.warn(
        f"method={method!r} cannot keep κ⁺(X+C) ≤ 2.002 on {failed} of {total} matrices of shape {shape}; they were "
        f"done again by method='svd'. Pass method='svd', or a rank_tol above the noise, to avoid doing them twice.",
        stacklevel=2,
    )


# -------------------------------------------------------------------------------------------- their parts


def unscale(sigma: Tensor, scale: Tensor | None, bad: Tensor, out: Tensor) -> Tensor:
    """σ·2^scale, and NaN in σ and F where X was not finite."""
    sigma = sigma if scale is None else torch.ldexp(sigma, scale[:, None])
    if bad.any():
        out.masked_fill_(bad[:, None, None], torch.nan)
        sigma = sigma.masked_fill(bad[:, None], torch.nan)
    return sigma


def onto_range(v: Tensor, sigma: Tensor) -> Tensor:
    """V_r V_rᵀ."""
    projector: Tensor = (v * (sigma > 0)[..., None, :]) @ v.mT
    return projector


def gaussian_probes(d: int, device: torch.device) -> Tensor:
    """The same d×`PROBES` normal numbers in every call, ``float64``."""
    return torch.randn(d, PROBES, generator=torch.Generator().manual_seed(d), dtype=torch.float64).to(device)


def tolerance(fro: Tensor, sigma_max: Tensor, noise: Tensor, rank_tol: float | None) -> Tensor:
    """The singular value up to which a direction counts as zero, ``(...)``."""
    wanted = rank_tol * sigma_max if rank_tol is not None else noise * fro
    return torch.maximum(wanted, DECOMPOSITION_NOISE * sigma_max)
