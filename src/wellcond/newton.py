"""``newton``: the polar factor by matrix products alone, for devices where SVD and `eigh` are slow or missing.

The factor grows out of X by odd polynomials, F ← F·(aI + bG + cG²) with G = FᵀF, which act on every singular
value alone. Growing: the optimal quintics of Polar Express (Amsel, Persson, Musco, Gower, arXiv 2505.16932,
algorithm 1 with its cushion) for the interval [ℓ, 1]. Sorting: p(σ) = (5σ³ − 3σ⁵)/2 has attracting fixed points
0 and 1 and the repelling one √(2/3) between them, so it takes what is below the tolerance to 0 and the rest to 1.
X is scaled so that its rank tolerance arrives at √(2/3) after growing; this is how rank-deficient tokens come
out right without an eigenvalue. Then Newton-Schulz, (3σ − σ³)/2, which converges quadratically.

Everything is a pure function of tensors with a fixed number of steps, so it can be compiled, exported and vmapped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wellcond.decompositions import batched_vmap, decompose, full_precision, warn_fallback
from wellcond.parallel import for_each, parts_of

THRESHOLD = (2 / 3) ** 0.5
CUSHION = 0.05
"""Quintics are not made steeper than for [0.05, 1]: steeper ones press middle singular values into the noise."""

SORTING = (0.0, 2.5, -1.5)
NEWTON_SCHULZ = (1.5, -0.5, 0.0)
SORTING_STEPS = 6
POLISHING_STEPS = 2
SQUARINGS = 18
"""XᵀX is squared so often to single out σ₁: then only eigenvalues within 1e-5 of the first keep weight."""

GROWN = 0.95
"""Growing ends when everything above the tolerance is within [0.95, 1.05] or closer."""

UNFINISHED = 5e-4
"""Largest ‖G − G²‖_F, G = FᵀF, that passes: every singular value of F is then within 3e-4 of 0 or 1."""

INDEFINITE = 2e-4
"""FᵀX + 2e-4·σ₁·I must have a Cholesky factor: a turned sign leaves FᵀF alone and shows here."""

Quintic = tuple[float, float, float]


class Schedule(NamedTuple):
    """Polynomials for a working precision, and the σ that they take to √(2/3)."""

    steps: tuple[Quintic, ...]
    threshold: float


def evaluate(steps: tuple[Quintic, ...], sigma: float) -> float:
    """The composition of the quintics at one singular value."""
    for a, b, c in steps:
        sigma = sigma * (a + b * sigma**2 + c * sigma**4)
    return sigma


def optimal_quintic(lower: float, upper: float) -> Quintic:
    """The odd quintic closest to 1 on [lower, upper], by the Remez exchange of four points.

    >>> a, b, c = optimal_quintic(0.1, 1.0)
    >>> values = [x * (a + b * x**2 + c * x**4) for x in (0.1, 1.0)]
    >>> abs(values[0] - values[1]) < 1.0 and abs(sum(values) / 2 - 1) < 0.6
    True
    """
    if lower / upper > 1 - 5e-6:
        return (15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5)
    inner = ((3 * lower + upper) / 4, (lower + 3 * upper) / 4)
    a = b = c = 0.0
    for _ in range(60):
        points = (lower, *inner, upper)
        a, b, c, _error = solve([[x, x**3, x**5, (-1.0) ** i] for i, x in enumerate(points)], [1.0] * 4)
        root = max(9 * b * b - 20 * a * c, 0.0) ** 0.5
        inner = (((-3 * b - root) / (10 * c)) ** 0.5, ((-3 * b + root) / (10 * c)) ** 0.5)
    return a, b, c


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with pivoting, for the few unknowns of `optimal_quintic`."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(size):
            if r != i:
                ratio = rows[r][i] / rows[i][i]
                rows[r] = [x - ratio * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def extremes(step: Quintic, low: float, high: float) -> tuple[float, float]:
    """Smallest and largest value of a quintic on [low, high]."""
    a, b, c = step
    points = [low, high]
    discriminant = 9 * b * b - 20 * a * c
    if discriminant >= 0 and c:
        squares = [(-3 * b + sign * discriminant**0.5) / (10 * c) for sign in (-1, 1)]
        points += [q**0.5 for q in squares if low**2 <= q <= high**2]
    values = [evaluate((step,), point) for point in points]
    return min(values), max(values)


def make_schedule(lower: float) -> Schedule:
    """Growing from [lower, 1] until everything above ``lower`` is near 1; the threshold by bisection."""
    steps: list[Quintic] = []
    low, high = lower, 1.0
    while low < GROWN * high:
        start = max(low, CUSHION * high)
        step = optimal_quintic(start, high)
        least, most = extremes(step, start, high)
        centre = 2 / (least + most)
        step = (step[0] * centre, step[1] * centre, step[2] * centre)
        steps.append(step)
        low, high = min(evaluate((step,), low), least * centre), most * centre
    growing = tuple(steps)
    under, over = 0.0, lower
    for _ in range(60):
        middle = (under + over) / 2
        under, over = (middle, over) if evaluate(growing, middle) < THRESHOLD else (under, middle)
    return Schedule(growing + (SORTING,) * SORTING_STEPS + (NEWTON_SCHULZ,) * POLISHING_STEPS, over)


SCHEDULES = {torch.float32: make_schedule(3e-8), torch.float64: make_schedule(2e-15)}


# ---------------------------------------------------------------------------------------- the operator


@torch.library.custom_op("wellcond::newton", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def checked_newton(
    x: Tensor, noise: Tensor, max_rank: Tensor, rank_tol: float, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """F, σ₁ and r of tall X ``(..., N, d)`` by `newton`; what fails its check is done again by ``svd``.

    The rank is at most ``max_rank`` ``(...)``, and no less either if ``exact``.

    One opaque operator, because the check looks at values. ``torch.export`` takes `newton` itself instead.
    """
    batch, (n, d) = x.shape[:-2], x.shape[-2:]
    count = batch.numel()
    flat, flat_noise, flat_rank = x.reshape(count, n, d), noise.reshape(count), max_rank.reshape(count)
    factor = torch.empty_like(flat, memory_format=torch.contiguous_format)
    sigma_max = x.new_empty(count)
    rank = flat_rank.clone()

    def do(part: slice) -> int:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            found = newton(flat[part], flat_noise[part], rank_tol)
            factor[part], sigma_max[part] = found.factor, found.sigma_max
            rank[part] = rank_of(found.factor)
            wrong_rank = (rank[part] > flat_rank[part]) | (exact & (rank[part] != flat_rank[part]))
            failed = (rank[part] >= 0) & (wrong_rank | ~passes(flat[part], found))
            if not failed.any():
                return 0
            factor[part][failed], sigma_max[part][failed], rank[part][failed], _, _ = decompose(
                flat[part][failed], flat_noise[part][failed], flat_rank[part][failed], rank_tol, "svd", False
            )
            return int(failed.sum())

    flops = count * d * d * (n + 20 * d)
    with full_precision():
        failed = sum(for_each(do, parts_of(flat, flops), x.device, flops))
    if failed:
        warn_fallback("newton", failed, count, (n, d))
    return factor.view(x.shape), sigma_max.view(batch), rank.view(batch)


@checked_newton.register_fake
def _(
    x: Tensor, noise: Tensor, max_rank: Tensor, rank_tol: float, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch = x.shape[:-2]
    factor = torch.empty_like(x, memory_format=torch.contiguous_format)
    return factor, x.new_empty(batch), x.new_empty(batch, dtype=torch.long)


checked_newton.register_vmap(batched_vmap(checked_newton))


def passes(x: Tensor, found: Newton) -> Tensor:
    """Whether F is a partial isometry, FᵀX positive semidefinite, and nothing above the tolerance left out."""
    f = found.factor
    g = f.mT @ f
    h = f.mT @ x
    unfinished = torch.linalg.matrix_norm(g - g @ g)
    scale = positive(found.sigma_max)[..., None, None]
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    _, info = torch.linalg.cholesky_ex((h + h.mT) / (2 * scale) + INDEFINITE * identity)
    left_out = torch.linalg.matrix_norm((f @ h).sub_(x).div_(scale))
    rounding = 32 * torch.finfo(x.dtype).eps * torch.linalg.matrix_norm(x)
    allowed = (3 * found.tolerance * x.shape[-1] ** 0.5 + rounding) / scale[..., 0, 0]
    good: Tensor = (unfinished <= UNFINISHED) & (info == 0) & (left_out <= allowed)
    return good


def rank_of(factor: Tensor) -> Tensor:
    """The number of singular values 1 of a partial isometry, −1 where it is not finite."""
    count = factor.square().sum((-2, -1))
    return torch.where(count.isfinite(), count.round(), -1.0).long()


# --------------------------------------------------------------------------------------- the iteration


class Newton(NamedTuple):
    """F ``(..., N, d)`` (before the first step: the scaled X), σ₁ ``(...)``, the projector on the leading right
    singular vectors divided by their number ``(..., d, d)``, and the rank tolerance ``(...)``."""

    factor: Tensor
    sigma_max: Tensor
    leading: Tensor
    tolerance: Tensor


def newton(x: Tensor, noise: Tensor, rank_tol: float) -> Newton:
    """The polar factor of tall X ``(..., N, d)``, float32 or float64, in its own precision.

    ``noise`` ``(...)`` is the rank tolerance relative to ‖X‖_F; ``rank_tol`` ≥ 0 is one relative to σ₁ instead.
    Not below 4 times the rounding noise of this method, which is that of ``x.dtype``.
    """
    begun = prepare(x, noise, rank_tol, torch.finfo(x.dtype).eps)
    for step in SCHEDULES[x.dtype].steps:
        begun = begun._replace(factor=advance(begun.factor, step))
    return begun


def prepare(x: Tensor, noise: Tensor, rank_tol: float, eps: float) -> Newton:
    """Everything before the first step; ``eps`` of the precision that decides the rank."""
    n, d = x.shape[-2:]
    largest = x.abs().amax((-2, -1))
    unit = x / positive(largest)[..., None, None]
    gram = unit.mT @ unit
    fro = trace(gram).sqrt()
    leading = gram / positive(trace(gram))[..., None, None]
    for _ in range(SQUARINGS):  # (XᵀX)^(2^18): only eigenvalues within 1e-5 of the first keep weight
        leading = leading @ leading
        leading = leading / positive(trace(leading))[..., None, None]
    sigma_max = (gram * leading).sum((-2, -1)).clamp(min=0).sqrt()

    own = 4 * eps * (n**-0.5 + d**-0.5) * fro
    wanted = noise.to(x.dtype) * fro if rank_tol < 0 else rank_tol * sigma_max
    threshold = SCHEDULES[x.dtype].threshold
    tolerance = torch.maximum(torch.maximum(wanted, own), 1.001 * threshold * sigma_max)
    start = unit * (threshold / positive(tolerance))[..., None, None]
    return Newton(start, sigma_max * largest, leading, tolerance * largest)


def advance(f: Tensor, step: Quintic) -> Tensor:
    """F·(aI + bG + cG²), G = FᵀF."""
    g = f.mT @ f
    grown: Tensor = f @ quintic_of(g, step)
    return grown


def quintic_of(g: Tensor, step: Quintic) -> Tensor:
    """aI + bG + cG²."""
    a, b, c = step
    q = b * g + c * (g @ g) if c else b * g
    return q + a * torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)


def newton_adjoint(x: Tensor, noise: Tensor, rank_tol: float, g: Tensor, g_sigma: Tensor) -> Tensor:
    """The adjoint of the derivatives of F and σ₁, by matrix products alone.

    dF is its own adjoint, and the derivative of X ↦ F in direction g is the derivative of the iteration: F and
    its tangent go through the steps together, again from the start, so nothing is kept from the forward pass.
    In float64 where the device has it, because the steps' rounding adds up in the tangent.
    """
    eps, dtype = torch.finfo(x.dtype).eps, x.dtype
    if x.device.type != "mps":
        x, noise, g, g_sigma = x.double(), noise.double(), g.double(), g_sigma.double()
    begun = prepare(x, noise, rank_tol, eps)
    scale = (SCHEDULES[x.dtype].threshold / positive(begun.tolerance))[..., None, None]
    f, t = begun.factor, g * scale
    for a, b, c in SCHEDULES[x.dtype].steps:
        gram, cross = f.mT @ f, f.mT @ t
        turn = cross + cross.mT
        mixed = turn @ gram
        q, dq = quintic_of(gram, (a, b, c)), b * turn + c * (mixed + mixed.mT)
        f, t = f @ q, t @ q + f @ dq
    return (t + g_sigma[..., None, None] * (f @ begun.leading)).to(dtype)


def positive(value: Tensor) -> Tensor:
    """``value``, and 1 where it is 0: a denominator."""
    return torch.where(value > 0, value, 1.0)


def trace(matrix: Tensor) -> Tensor:
    """Sum of the diagonal of ``(..., d, d)``."""
    total: Tensor = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    return total
