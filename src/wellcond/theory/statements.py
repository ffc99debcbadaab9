"""The statements of the paper as functions: both sides, whether the statement covers the data, whether it holds.

Notation: tokens X ``(N, d)``, weights W_Q, W_K ``(d, d_k)`` and W_V ``(d, d_v)``, softmax matrix S ``(N, N)``.
All functions take single real matrices of any floating dtype and compute in float64.

One lemma carries all the rest: κ(AB) ≤ κ(A)κ(B). It is not true for every pair of shapes. For A ``(m, k)``
and B ``(k, n)`` it is true for all matrices if and only if min(m, n) ≤ k ≤ max(m, n): with a smaller inner
dimension AB loses rank always, with a larger one it can. See `product`.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from wellcond.linalg import NullSpace, condition_number, position_code, spectrum
from wellcond.tokens import conditioned_tokens


@dataclasses.dataclass(frozen=True)
class Statement:
    """One inequality ``left <= right`` evaluated on data.

    Attributes:
        name: what is compared, in symbols.
        source: where the statement is from: a number in the paper, or "ours".
        left, right: both sides; ``inf`` where a matrix is rank-deficient.
        applies: whether the statement's conditions are met, so that it promises something here.
        reason: why it applies or not, with the numbers that decide it.
        holds: whether ``left <= right`` on this data, up to rounding. None: float64 cannot tell, because
            the right side is beyond what a float64 singular value resolves, or a logit overflowed.
    """

    name: str
    source: str
    left: float
    right: float
    applies: bool
    reason: str
    holds: bool | None

    @property
    def slack(self) -> float:
        """How loose the bound is: right/left, 1 where it is attained; nan where both sides are infinite."""
        if math.isinf(self.left):
            return math.nan if math.isinf(self.right) else 0.0
        return self.right / self.left if self.left else math.inf


# ----------------------------------------------------------------------------------------------- the lemma


def keeps_rank(m: int, k: int, n: int) -> bool:
    """Whether κ(AB) ≤ κ(A)κ(B) for *all* A ``(m, k)`` and B ``(k, n)``: min(m, n) ≤ k ≤ max(m, n).

    >>> keeps_rank(5, 3, 2), keeps_rank(1, 2, 1), keeps_rank(2, 1, 2)
    (True, False, False)
    """
    return min(m, n) <= k <= max(m, n)


def product(a: Tensor, b: Tensor) -> Statement:
    """κ(AB) ≤ κ(A) κ(B), the step that the paper's bounds are made of.

    True for all matrices of a shape if and only if min(m, n) ≤ k ≤ max(m, n), for A ``(m, k)``, B ``(k, n)``:

    - m ≥ k ≥ n: then σ_n(AB) ≥ σ_k(A) σ_n(B); and the same transposed for n ≥ k ≥ m.
    - k < min(m, n): AB has rank k at most, so κ(AB) = ∞ whatever A and B are.
    - k > max(m, n): the range of B can miss that of Aᵀ: with A = [1 0] and B = [0 1]ᵀ, AB = 0.

    Raises:
        TypeError: a matrix is not real floating.
        ValueError: not two axes, or the inner dimensions differ.

    >>> import torch
    >>> counterexample = product(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]]))
    >>> counterexample.left, counterexample.right, counterexample.applies, counterexample.holds
    (inf, 1.0, False, False)
    """
    a, b = matrices(a=a, b=b)
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ValueError(
            f"A {tuple(a.shape)} and B {tuple(b.shape)} have different inner dimensions {k}, {k_b}"
        )
    applies = keeps_rank(m, k, n)
    return compare(
        "κ(AB) ≤ κ(A) κ(B)",
        "lemma",
        kappa(a @ b),
        kappa(a) * kappa(b),
        applies,
        between(m, k, n),
        max(m, k, n),
    )


# ------------------------------------------------------------------------------------------- Proposition 4.2


def linear_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Statement:
    """Proposition 4.2: κ(X W_Q W_Kᵀ Xᵀ X W_V) ≤ κ(W_Q) κ(W_K) κ(W_V) κ(X)³.

    Read as X · W_Q · W_Kᵀ · (XᵀX) · W_V, every step keeps rank if N ≥ d, d_k = d and (d_v ≤ d or N = d).
    Heads narrower than the model (d_k < d) are never covered: W_Q W_Kᵀ is then rank-deficient.

    Args:
        x: ``(N, d)``; w_q, w_k: ``(d, d_k)``; w_v: ``(d, d_v)``.

    Raises:
        TypeError, ValueError: shapes that do not multiply, or see `product`.

    >>> import torch
    >>> s = linear_attention(torch.eye(3), torch.eye(3), torch.eye(3), torch.diag(torch.tensor([2.0, 1, 1])))
    >>> s.left, s.right, s.applies, s.holds
    (2.0, 2.0, True, True)
    """
    x, w_q, w_k, w_v = attention_matrices(x, w_q, w_k, w_v)
    (n, d), d_k, d_v = x.shape, w_q.shape[1], w_v.shape[1]
    broken = [between(*step) for step in ((n, d, d_k), (n, d_k, d), (n, d, d_v)) if not keeps_rank(*step)]
    if n < d:
        broken.append(f"XᵀX is {d}×{d} of rank {n} at most, as there are fewer tokens than features")
    left = kappa(x @ w_q @ (w_k.mT @ (x.mT @ (x @ w_v))))
    right = kappa(w_q) * kappa(w_k) * kappa(w_v) * kappa(x) ** 3
    return compare(
        "κ(LA(X)) ≤ κ(W_Q) κ(W_K) κ(W_V) κ(X)³",
        "Proposition 4.2",
        left,
        right,
        not broken,
        "; ".join(dict.fromkeys(broken)) or f"N = {n} ≥ d = {d} = d_k and d_v = {d_v}: no step loses rank",
        max(n, d, d_k, d_v),
    )


def softmax_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Statement:
    """Proposition 4.2: κ(S X W_V) ≤ κ(S) κ(X) κ(W_V), S = softmax(X W_Q W_Kᵀ Xᵀ).

    S is square, so only X W_V can lose rank: the bound is covered if min(N, d_v) ≤ d ≤ max(N, d_v). One
    head (d_v = d) always is; narrow heads are if N ≥ d. `values_attention` is what remains true otherwise.

    Arguments and errors as `linear_attention`; a scale 1/√d_k belongs into ``w_q``.

    >>> import torch
    >>> s = softmax_attention(torch.eye(3), torch.eye(3), torch.eye(3), torch.eye(3))
    >>> s.applies, s.holds, round(s.slack, 6)
    (True, True, 1.0)
    """
    x, w_q, w_k, w_v = attention_matrices(x, w_q, w_k, w_v)
    (n, d), d_v = x.shape, w_v.shape[1]
    weights = softmax_matrix(x, w_q, w_k)
    return compare(
        "κ(A(X)) ≤ κ(S) κ(X) κ(W_V)",
        "Proposition 4.2",
        kappa(weights @ x @ w_v),
        kappa(weights) * kappa(x) * kappa(w_v),
        keeps_rank(n, d, d_v),
        between(n, d, d_v),
        max(n, d, d_v),
    )


def values_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Statement:
    """κ(S V) ≤ κ(S) κ(V) with V = X W_V: covers every shape, because S is square. Ours.

    Arguments and errors as `linear_attention`.
    """
    x, w_q, w_k, w_v = attention_matrices(x, w_q, w_k, w_v)
    weights, values = softmax_matrix(x, w_q, w_k), x @ w_v
    return compare(
        "κ(A(X)) ≤ κ(S) κ(X W_V)",
        "ours",
        kappa(weights @ values),
        kappa(weights) * kappa(values),
        True,
        "S is square, so that no rank is lost",
        max(*x.shape, w_v.shape[1]),
    )


def split_heads(w: Tensor, heads: int) -> list[Tensor]:
    """The weights ``(d, heads·d_k)`` of a layer as one ``(d, d_k)`` for each head.

    Every statement about many heads is about each of them: the paper's figures average κ over heads.

    >>> import torch
    >>> [tuple(w.shape) for w in split_heads(torch.zeros(6, 6), 2)]
    [(6, 3), (6, 3)]
    """
    if heads < 1 or w.shape[-1] % heads:
        raise ValueError(f"{w.shape[-1]} columns do not divide among {heads} heads")
    return list(w.chunk(heads, dim=-1))


# ------------------------------------------------------------------------------------- Theorems 4.4 and 4.5


def conditioning(x: Tensor, *, null_space: NullSpace = "range") -> Statement:
    """Theorem 4.4: κ(X + C) ≤ 2 for C = σ₁ U Vᵀ.

    The singular values of X + C are σ_i + σ₁, so the left side is 2σ₁/(σ_min + σ₁) where X has full rank.
    With ``null_space="range"`` a rank-deficient X keeps its null space, and κ = ∞, while κ⁺ ≤ 2; with
    ``"complete"`` κ ≤ 2 for every X but 0.

    Args:
        x: ``(N, d)``.

    >>> import torch
    >>> s = conditioning(torch.diag(torch.tensor([1000.0, 1.0])))
    >>> round(s.left, 3), s.right, s.holds
    (1.998, 2.0, True)
    """
    (x,) = matrices(x=x)
    rank, full = int(spectrum(x).rank), min(x.shape)
    applies = rank == full or (null_space == "complete" and rank > 0)
    reason = f"rank {rank} of {full}"
    if not applies:
        reason += ": κ⁺(X + C) ≤ 2 all the same; null_space='complete' bounds κ" if rank else ": X is zero"
    left = kappa(conditioned_tokens(x, null_space=null_space))
    return compare("κ(X + C) ≤ 2", "Theorem 4.4", left, 2.0, applies, reason, max(x.shape))


def conditioned_bound(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, *, conditioned: Tensor | None = None
) -> Statement:
    """Theorem 4.5: the bound of Proposition 4.2 for A(X + C) is at most the bound for A(X).

    The assumption on the softmax factor, in the form tested here: with S(X) = softmax(X W_Q W_Kᵀ Xᵀ),

        κ(S(X + C)) ≤ κ(S(X)) · κ(X)/2.

    κ(X)/2 is what Theorem 4.4 guarantees to be gained. If it is met, the bound for X + C is at most
    κ(S(X+C)) · 2 · κ(W_V) ≤ κ(S(X)) κ(X) κ(W_V). It is sufficient, not necessary.

    The theorem compares two *bounds*. `conditioned_attention` compares what they bound.

    Args:
        x, w_q, w_k, w_v: as `linear_attention`.
        conditioned: Y ``(N, d)`` in place of X + C, such as what a LayerNorm makes of conditioned tokens. Then
            the gain is κ(X)/max(2, κ(Y)).

    Raises:
        TypeError, ValueError: as `linear_attention`.
    """
    x, w_q, w_k, w_v = attention_matrices(x, w_q, w_k, w_v)
    y = conditioned_or(conditioned, x)
    before, after = kappa(softmax_matrix(x, w_q, w_k)), kappa(softmax_matrix(y, w_q, w_k))
    k_x, k_y, k_v = kappa(x), kappa(y), kappa(w_v)
    finite = math.isfinite(before * k_x)
    allowed = before * k_x / max(2.0, k_y) if finite else math.inf
    met = finite and after <= allowed
    reason = (
        f"κ(S) {before:.4g} to {after:.4g}, allowed {allowed:.4g}: assumption {'met' if met else 'not met'}"
    )
    if not finite:
        reason = "X or S(X) is rank-deficient, so that the bound to compare with is infinite"
    return compare(
        "bound of A(X+C) ≤ bound of A(X)",
        "Theorem 4.5",
        after * k_y * k_v,
        before * k_x * k_v,
        met,
        reason,
        max(*x.shape, w_v.shape[1]),
    )


def conditioned_attention(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, *, conditioned: Tensor | None = None
) -> Statement:
    """κ(A(X + C)) against κ(A(X)): what one hopes for, and what no statement of the paper promises.

    Arguments and errors as `conditioned_bound`.
    """
    x, w_q, w_k, w_v = attention_matrices(x, w_q, w_k, w_v)
    y = conditioned_or(conditioned, x)
    return compare(
        "κ(A(X+C)) ≤ κ(A(X))",
        "no statement",
        kappa(softmax_matrix(y, w_q, w_k) @ y @ w_v),
        kappa(softmax_matrix(x, w_q, w_k) @ x @ w_v),
        False,
        "Theorem 4.5 orders the bounds, not the condition numbers beneath them",
        max(*x.shape, w_v.shape[1]),
    )


# ------------------------------------------------------------------------------------- the fixed correction


def fixed_correction(x: Tensor, strength: float, code: Tensor | None = None) -> Statement:
    """κ(X + λQ) ≤ (λσ_max(Q) + σ₁)/(λσ_min(Q) − σ₁), λ = ``strength``·σ₁(X). Ours, not the paper's.

    By Weyl's inequality |σ_i(A+B) − σ_i(A)| ≤ σ₁(B). It says something only while λσ_min(Q) > σ₁; at
    strength 1 it is silent. Q does not depend on X: the scope ``"static"``.

    Args:
        x: ``(N, d)``.
        strength: λ in units of σ₁, > 0.
        code: Q ``(N, d)``; default `wellcond.linalg.position_code`.

    >>> import torch
    >>> s = fixed_correction(torch.ones(4, 8), strength=3.0)
    >>> s.applies, s.holds, round(s.right, 6)
    (True, True, 2.0)
    """
    (x,) = matrices(x=x)
    if not strength > 0:
        raise ValueError(f"strength is λ/σ₁ > 0, got {strength}")
    q = position_code(*x.shape).to(x.device) if code is None else matrices(code=code)[0]
    if q.shape != x.shape:
        raise ValueError(f"code has shape {tuple(q.shape)}, tokens {tuple(x.shape)}; they must agree")
    sigma = spectrum(x).sigma_max.item()
    lam, of_code = strength * sigma, spectrum(q)
    gap = lam * of_code.sigma_min.item() - sigma
    applies = gap > 0
    return compare(
        "κ(X + λQ) ≤ (λσ_max(Q) + σ₁)/(λσ_min(Q) − σ₁)",
        "ours (Weyl)",
        kappa(x + lam * q),
        (lam * of_code.sigma_max.item() + sigma) / gap if applies else math.inf,
        applies,
        f"λσ_min(Q) = {lam * of_code.sigma_min.item():.4g} against σ₁ = {sigma:.4g}",
        max(x.shape),
    )


# ---------------------------------------------------------------------------------------------- what all need


def compare(
    name: str, source: str, left: float, right: float, applies: bool, reason: str, size: int
) -> Statement:
    """A `Statement` with ``holds`` decided at the resolution of float64 for matrices of ``size``."""
    resolution = 1.0 / (size * torch.finfo(torch.float64).eps)
    holds: bool | None = left <= right
    if math.isnan(left) or math.isnan(right) or (not holds and right >= resolution):
        holds = None
    elif not holds:
        holds = left <= right * (1.0 + right / resolution)
    return Statement(name, source, left, right, applies, reason, holds)


def kappa(x: Tensor) -> float:
    """κ of one matrix, in float64; inf where it is numerically rank-deficient."""
    return condition_number(x).item()


def softmax_matrix(x: Tensor, w_q: Tensor, w_k: Tensor) -> Tensor:
    """S = softmax(X W_Q W_Kᵀ Xᵀ), ``(N, N)``, rows summing to 1."""
    return ((x @ w_q) @ (x @ w_k).mT).softmax(-1)


def between(m: int, k: int, n: int) -> str:
    """The shape condition of `product` in words."""
    word = "between" if keeps_rank(m, k, n) else "not between"
    return f"({m}×{k})·({k}×{n}): inner dimension {k} is {word} {min(m, n)} and {max(m, n)}"


def matrices(**named: Tensor) -> list[Tensor]:
    """Float64 copies of real matrices, detached; TypeError or ValueError names the one that is not."""
    for name, value in named.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(
                f"{name} must be a real floating tensor, got {getattr(value, 'dtype', type(value))}"
            )
        if value.ndim != 2 or 0 in value.shape:
            raise ValueError(f"{name} must be one non-empty matrix with two axes, got {tuple(value.shape)}")
        if not value.isfinite().all():
            raise ValueError(f"{name} of shape {tuple(value.shape)} holds NaN or infinity")
    return [value.detach().double() for value in named.values()]


def conditioned_or(conditioned: Tensor | None, x: Tensor) -> Tensor:
    """The tokens after conditioning: those given, or X + C."""
    if conditioned is None:
        return conditioned_tokens(x)
    (y,) = matrices(conditioned=conditioned)
    if y.shape != x.shape:
        raise ValueError(f"conditioned has shape {tuple(y.shape)}, X {tuple(x.shape)}; they must agree")
    return y


def attention_matrices(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> list[Tensor]:
    """`matrices` of one attention head whose shapes multiply."""
    x, w_q, w_k, w_v = matrices(x=x, w_q=w_q, w_k=w_k, w_v=w_v)
    d = x.shape[1]
    if w_q.shape != w_k.shape or w_q.shape[0] != d or w_v.shape[0] != d:
        raise ValueError(
            f"X {tuple(x.shape)} needs W_Q, W_K of shape ({d}, d_k) and W_V of shape ({d}, d_v), got "
            f"{tuple(w_q.shape)}, {tuple(w_k.shape)}, {tuple(w_v.shape)}"
        )
    return [x, w_q, w_k, w_v]
