"""Spectra, the polar factor and its derivative: the contract of every method, against float64 and by hand."""

from __future__ import annotations

import warnings
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellcond.linalg import (
    Method,
    condition_number,
    polar,
    position_code,
    spectrum,
)

METHODS = get_args(Method)
BOUND = 2.002

shapes = st.tuples(st.integers(1, 3), st.integers(1, 14), st.integers(1, 14))
seeds = st.integers(0, 2**31 - 1)


def with_sigma(sigma: Tensor, n: int, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random n×d matrix with the singular values ``sigma`` (fewer than min(n, d): the rest are zero)."""
    generator = torch.Generator().manual_seed(seed)
    k = len(sigma)
    u = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64)).Q
    return ((u * sigma.double()) @ v.mT).to(dtype)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exact_factor(x: Tensor, rank: int | None = None) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u[..., :rank] @ vh[..., :rank, :]


def conditioned_kappa(x: Tensor, rank: int | None = None, **options: object) -> Tensor:
    """κ⁺(X+C) with the true rank given, measured in float64 without the library."""
    result = polar(x, **options)  # type: ignore[arg-type]
    y = x.double() + result.sigma_max.double()[..., None, None] * result.factor.double()
    sigma = torch.linalg.svdvals(y)[..., :rank]
    return sigma[..., 0] / sigma[..., -1]


# ------------------------------------------------------------------------------------------------ spectra


@given(shapes, seeds)
@settings(max_examples=40, deadline=None)
def test_spectrum_is_that_of_the_svd(shape: tuple[int, int, int], seed: int) -> None:
    x = random(*shape, seed=seed)
    expected = torch.linalg.svdvals(x)
    found = spectrum(x)
    torch.testing.assert_close(found.sigma_max, expected[..., 0])
    torch.testing.assert_close(found.sigma_min, expected[..., -1], atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found.kappa, expected[..., 0] / expected[..., -1], rtol=1e-6, atol=0)


def test_rank_deficiency_is_infinite_never_silently_finite() -> None:
    for x in (torch.ones(2, 2), torch.outer(torch.ones(8), torch.arange(1.0, 5))):
        found = spectrum(x)
        assert found.kappa == torch.inf
        assert found.rank == 1
        assert found.kappa_pinv == pytest.approx(1.0)
        assert condition_number(x) == torch.inf


def test_rank_of_a_swin_embedding_is_49_of_128() -> None:
    """Rank-deficient by construction: float32 rounding noise must not count, real directions must."""
    x = with_sigma(torch.logspace(0, -4, 49), 3136, 128, dtype=torch.float32)
    found = spectrum(x)
    assert found.rank == 49
    assert found.kappa == torch.inf
    assert found.kappa_pinv == pytest.approx(1e4, rel=0.02)


def test_rank_tol_is_a_share_of_sigma_max() -> None:
    x = torch.diag(torch.tensor([1.0, 0.5, 1e-3]))
    assert spectrum(x).rank == 3
    assert spectrum(x, rank_tol=0.01).rank == 2
    assert spectrum(x, rank_tol=0.01).kappa == torch.inf
    assert polar(x, rank_tol=0.6).rank == 1


def test_the_tolerance_follows_the_dtype() -> None:
    x = with_sigma(torch.tensor([1.0, 1e-5]), 64, 64)
    assert spectrum(x).rank == 2
    assert spectrum(x.float()).rank == 2
    assert spectrum(torch.diag(torch.tensor([1.0, 1e-5])).bfloat16()).rank == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert spectrum(x.float()).rank == 1, "under autocast the tokens carry the noise of its dtype"


def test_masked_rows_are_outside_the_matrix() -> None:
    x = random(2, 6, 4)
    mask = torch.tensor([[True] * 6, [True, False, True, True, False, False]])
    x[1, 1] = torch.nan
    found = spectrum(x, mask)
    expected = torch.linalg.svdvals(x[1, mask[1]])
    torch.testing.assert_close(found.sigma_min[1], expected[-1])
    assert found.rank.tolist() == [4, 3]
    assert found.kappa.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_empty_input_has_kappa_zero_and_a_factor_of_its_shape(
    shape: tuple[int, int, int],
) -> None:
    x = torch.zeros(shape)
    assert torch.equal(condition_number(x), torch.zeros(shape[0]))
    for method in METHODS:
        result = polar(x, method=method)
        assert result.factor.shape == shape
        assert result.rank.shape == shape[:1]
        assert result.factor.data_ptr() != x.data_ptr() or x.numel() == 0


def test_zero_matrix() -> None:
    found = spectrum(torch.zeros(4, 3))
    assert found.kappa == torch.inf
    assert found.kappa_pinv == 0
    assert found.rank == 0
    for method in METHODS:
        result = polar(torch.zeros(4, 3), method=method)
        assert torch.equal(result.factor, torch.zeros(4, 3))
        assert result.sigma_max == 0
        assert result.rank == 0


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_is_nan_and_stays_in_its_matrix(poison: float) -> None:
    x = random(3, 6, 4, dtype=torch.float32)
    x[1, 2, 3] = poison
    found = spectrum(x)
    assert found.kappa[1].isnan()
    assert found.sigma_max[1].isnan()
    assert found.rank[1] == -1
    for method in METHODS:
        result = polar(x, method=method)
        assert result.factor[1].isnan().all()
        assert result.sigma_max[1].isnan()
        assert result.rank[1] == -1
        clean = polar(x[[0, 2]], method=method)
        torch.testing.assert_close(result.factor[[0, 2]], clean.factor, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: spectrum(torch.ones(3)), ValueError, r"shape \(3,\)"),
        (lambda: polar(torch.ones(2, 2, dtype=torch.int64)), TypeError, "int64.*float"),
        (
            lambda: polar(torch.ones(2, 2, dtype=torch.complex64)),
            TypeError,
            "complex64",
        ),
        (lambda: spectrum([[1.0]]), TypeError, "list"),
        (lambda: polar(torch.ones(2, 2), torch.ones(2)), TypeError, "bool"),
        (
            lambda: polar(torch.ones(2, 2), torch.ones(3, dtype=torch.bool)),
            ValueError,
            r"\(3,\).*\(2, 2\)",
        ),
        (lambda: polar(torch.ones(2, 2), method="qr"), ValueError, "'svd'.*'qr'"),
        (
            lambda: polar(torch.ones(2, 2), null_space="zeros"),
            ValueError,
            "'range'.*'zeros'",
        ),
        (lambda: spectrum(torch.ones(2, 2), rank_tol=1.0), ValueError, "rank_tol"),
        (lambda: spectrum(torch.ones(2, 2), rank_tol=-0.1), ValueError, "rank_tol"),
    ],
)
def test_errors_name_the_value(call: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()  # type: ignore[operator]


# ------------------------------------------------------------------------------- the contract of a method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(40, 16), (16, 40), (24, 24), (300, 8), (17, 1), (1, 17)])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e4, 1e6])
def test_kappa_of_the_conditioned_matrix(method: Method, shape: tuple[int, int], kappa: float) -> None:
    k = min(shape)
    sigma = torch.logspace(0, -torch.tensor(kappa).log10().item(), k) if k > 1 else torch.ones(1)
    x = with_sigma(sigma, *shape, dtype=torch.float32)
    assert conditioned_kappa(x, rank_tol=0.0, method=method) <= BOUND
    result = polar(x, method=method, rank_tol=0.0)
    assert result.rank == k
    assert result.sigma_max == pytest.approx(float(sigma[0]), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lower", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("cluster", ["logspace", "one small", "one large", "two clusters"])
def test_kappa_for_hostile_spectra(method: Method, lower: float, cluster: str) -> None:
    sigma = {
        "logspace": torch.logspace(0, torch.tensor(lower).log10().item(), 32),
        "one small": torch.cat([torch.ones(31), torch.tensor([lower])]),
        "one large": torch.cat([torch.ones(1), torch.full((31,), lower)]),
        "two clusters": torch.cat([torch.ones(16), torch.full((16,), lower)]),
    }[cluster]
    x = torch.stack([with_sigma(sigma, 50, 32, seed=s, dtype=torch.float32) for s in range(3)])
    assert (conditioned_kappa(x, rank_tol=0.0, method=method) <= BOUND).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_deficient_matrix_keeps_the_bound_on_its_range(method: Method) -> None:
    x = with_sigma(torch.logspace(0, -4, 49), 784, 128, dtype=torch.float32)
    result = polar(x, method=method)
    assert result.rank == 49
    assert conditioned_kappa(x, rank=49, method=method) <= BOUND
    values = torch.linalg.svdvals(result.factor.double())
    assert (values[:49] - 1).abs().max() < 1e-3
    assert values[49:].max() < 1e-3


@pytest.mark.parametrize("method", METHODS)
@given(shape=shapes, seed=seeds)
@settings(max_examples=15, deadline=None)
def test_every_method_gives_the_polar_factor(method: Method, shape: tuple[int, int, int], seed: int) -> None:
    x = random(*shape, seed=seed)
    kappa = spectrum(x).kappa.max().item()
    found = polar(x, method=method).factor
    torch.testing.assert_close(found, exact_factor(x), atol=1e-12 * kappa + 1e-9, rtol=0)
    # The second factor FᵀX is symmetric and positive semidefinite: no direction has its sign turned.
    h = found.mT @ x if shape[1] >= shape[2] else x @ found.mT
    assert torch.linalg.eigvalsh((h + h.mT) / 2).min() >= -1e-9 * h.abs().max()


@pytest.mark.parametrize("method", METHODS)
def test_a4_identical_tokens_range_and_complete(method: Method) -> None:
    x = torch.outer(torch.ones(8), torch.arange(1.0, 5))
    sigma = torch.linalg.svdvals(x)[0]
    result = polar(x, method=method)
    torch.testing.assert_close(result.factor, x / sigma, atol=1e-6, rtol=0)

    complete = polar(x, method=method, null_space="complete")
    assert conditioned_kappa(x, method=method, null_space="complete") == pytest.approx(2.0, abs=2e-3)
    reference = polar(x, method="svd", null_space="complete").factor
    torch.testing.assert_close(complete.factor, reference, atol=1e-4, rtol=0)
    noisy = x + 1e-12 * random(8, 4, dtype=torch.float32)
    torch.testing.assert_close(
        polar(noisy, method=method, null_space="complete").factor,
        reference,
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.parametrize("method", METHODS)
def test_complete_fills_what_is_missing_and_nothing_else(method: Method) -> None:
    x = random(3, 9, 4) @ random(4, 6, seed=1)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 5:] = False
    short = polar(x, mask, method=method)
    full = polar(x, mask, method=method, null_space="complete")
    assert full.rank.tolist() == [4, 4, 4]
    values = torch.linalg.svdvals(full.factor)
    torch.testing.assert_close(values[[0, 2]], torch.ones(2, 6).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(values[1], torch.tensor([1.0] * 5 + [0.0]).double(), atol=1e-6, rtol=0)
    assert torch.equal(full.factor[1, 5:], torch.zeros(4, 6).double())
    filling = full.factor - short.factor
    assert (filling @ short.factor.mT).abs().max() < 1e-6
    assert (short.factor.mT @ filling).abs().max() < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18, 1e20])
def test_a6_scale_neither_overflows_nor_vanishes(method: Method, scale: float) -> None:
    x = random(6, 4, dtype=torch.float32)
    small = polar(x, method=method)
    scaled = polar(x * scale, method=method)
    torch.testing.assert_close(scaled.factor, small.factor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled.sigma_max / scale, small.sigma_max, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_extremes_of_every_dtype(method: Method, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for scale in (info.max / 64, info.tiny * 64):
        x = (random(6, 4) * (scale / 8)).to(dtype)
        factor = polar(x, method=method, rank_tol=0.0).factor
        torch.testing.assert_close(factor.double(), exact_factor(x), atol=2e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a10_alone_or_in_a_batch_and_again(method: Method) -> None:
    x = random(64, 40, 40, dtype=torch.float32)
    first = polar(x, method=method).factor
    for _ in range(3):
        assert torch.equal(polar(x, method=method).factor, first)
    gram = first.mT @ first
    assert (gram - torch.eye(40)).abs().max() < 1e-4
    for i in (0, 31, 63):
        alone = polar(x[i : i + 1], method=method).factor
        torch.testing.assert_close(alone[0], first[i], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_b5_neighbours_do_not_matter(method: Method) -> None:
    x = random(7, 5, dtype=torch.float32)
    pair = polar(torch.stack([x, 1e3 * x]), method=method)
    torch.testing.assert_close(pair.factor[0], polar(x, method=method).factor, atol=1e-6, rtol=0)
    torch.testing.assert_close(pair.factor[0], pair.factor[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_b6_leading_axes_and_the_transpose_rule(method: Method) -> None:
    x = random(2, 3, 10, 4)
    whole = polar(x, method=method)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(whole.factor[i, j], polar(x[i, j], method=method).factor)
    turned = polar(x.mT, method=method).factor
    torch.testing.assert_close(turned, whole.factor.mT, atol=1e-9, rtol=0)
    torch.testing.assert_close(
        turned @ turned.mT, torch.eye(4).double().expand(2, 3, 4, 4), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kappa_log", [2, 4, 6])
def test_b2_sixteen_singular_values(method: Method, kappa_log: int) -> None:
    x = with_sigma(torch.logspace(0, -kappa_log, 16), 32, 16, dtype=torch.float32)
    expected = 2 / (1 + 10.0**-kappa_log)
    assert conditioned_kappa(x, rank_tol=0.0, method=method) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("method", METHODS)
def test_c1_a_constant_sample_among_normal_ones(method: Method) -> None:
    x = random(4, 12, 6, dtype=torch.float32)
    x[2] = 1.5
    result = polar(x, method=method)
    assert result.factor.isfinite().all()
    assert result.rank.tolist() == [6, 6, 1, 6]


@pytest.mark.parametrize("method", METHODS)
def test_the_caller_keeps_the_tensor(method: Method) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = random(3, 6, 4).to(dtype)
        before = x.clone()
        result = polar(x, method=method)
        assert torch.equal(x, before)
        assert result.factor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("method", METHODS)
def test_strided_input(method: Method) -> None:
    wide = random(4, 6, 3, 5)
    x = wide.permute(0, 2, 1, 3)
    torch.testing.assert_close(polar(x, method=method).factor, polar(x.contiguous(), method=method).factor)
    expanded = random(6, 4).expand(3, 6, 4)
    assert polar(expanded, method=method).factor.shape == (3, 6, 4)


def test_no_warning_on_ordinary_tokens() -> None:
    x = with_sigma(torch.logspace(0, -4, 32), 64, 32, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in METHODS:
            polar(x, method=method)


# ------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("sigma", [(1.0, 0.7, 0.3), (1.0, 0.5, 0.5), (1.0, 1.0, 1.0)])
def test_gradcheck_distinct_and_repeated(
    method: Method, shape: tuple[int, int], sigma: tuple[float, ...]
) -> None:
    x = with_sigma(torch.tensor(sigma), *shape).requires_grad_()
    if shape == (4, 4):
        x = with_sigma(torch.tensor([*sigma, 0.2]), *shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: polar(t, method=method).factor, (x,))
    if sigma[0] > sigma[1]:
        assert torch.autograd.gradcheck(lambda t: polar(t, method=method).sigma_max, (x,))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_gradcheck_with_zero_singular_values(method: Method, shape: tuple[int, int]) -> None:
    """rank_tol keeps the rank constant under the finite differences, which is where F is differentiable."""
    x = with_sigma(torch.tensor([1.0, 0.6, 0.6]), *shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: polar(t, method=method, rank_tol=1e-3).factor, (x,))


@pytest.mark.parametrize("method", METHODS)
def test_gradcheck_batch_and_mask(method: Method) -> None:
    x = random(2, 6, 3).requires_grad_()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    assert torch.autograd.gradcheck(lambda t: polar(t, mask, method=method)[:2], (x,))


def test_gradcheck_complete() -> None:
    x = with_sigma(torch.tensor([1.0, 0.6]), 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: polar(t, null_space="complete", rank_tol=1e-3).factor, (x,), atol=1e-4
    )


@pytest.mark.parametrize("method", METHODS)
def test_a2_a_small_gap_is_harmless(method: Method) -> None:
    for gap in (1e-6, 0.0):
        x = with_sigma(
            torch.tensor([1.0, 1.0 + gap, 0.5, 0.25], dtype=torch.float64),
            4,
            4,
            dtype=torch.float32,
        )
        weight = random(4, 4, seed=3, dtype=torch.float32)
        single = x.clone().requires_grad_()
        (polar(single, method=method).factor * weight).sum().backward()
        double = x.double().requires_grad_()
        (polar(double, method="svd").factor * weight).sum().backward()
        assert single.grad is not None
        assert double.grad is not None
        assert (single.grad - double.grad).norm() <= 1e-5 * double.grad.norm()


def test_repeated_sigma_max_gets_a_finite_subgradient() -> None:
    x = torch.eye(3, dtype=torch.float64).requires_grad_()
    polar(x).sigma_max.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.eye(3, dtype=torch.float64) / 3)


@pytest.mark.parametrize("method", METHODS)
def test_a13_a_second_derivative_raises(method: Method) -> None:
    x = random(5, 3).requires_grad_()
    (grad,) = torch.autograd.grad(
        polar(x, method=method).factor.square().sum() + x.sum(), x, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_vmap(method: Method) -> None:
    x = random(4, 6, 3)
    torch.testing.assert_close(
        torch.vmap(lambda t: polar(t, method=method).factor)(x),
        polar(x, method=method).factor,
    )
    torch.testing.assert_close(
        torch.vmap(lambda t: polar(t, method=method).factor, in_dims=1, out_dims=1)(x.movedim(0, 1)),
        polar(x, method=method).factor.movedim(0, 1),
    )
    gradient = torch.vmap(torch.func.grad(lambda t: polar(t, method=method).factor.sum()))(x)
    leaf = x.clone().requires_grad_()
    polar(leaf, method=method).factor.sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


# ----------------------------------------------------------------------------------------- position code


@given(st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_position_code_is_nearly_orthogonal_and_the_same_at_every_length(n: int, d: int) -> None:
    q = position_code(n, d)
    assert q.shape == (n, d)
    values = torch.linalg.svdvals(q)
    assert values[0] / values[-1] <= 2**0.5 + 1e-12
    assert torch.equal(position_code(n + 3, d)[:n], q)
    if n <= d:
        torch.testing.assert_close(q @ q.mT, torch.eye(n).double(), atol=1e-12, rtol=0)


def test_position_code_is_fixed_for_all_time() -> None:
    """Checkpoints depend on these numbers: the first entries of block 0 for d = 2, worked out by hand."""
    import random as python_random

    uniform = python_random.Random(0)
    a, b, c, e = (2 * uniform.random() - 1 for _ in range(4))
    norm = (a * a + c * c) ** 0.5
    sign = 1.0 if a * e - b * c > 0 else -1.0
    expected = torch.tensor([[a, -c * sign], [c, a * sign]], dtype=torch.float64) / norm
    torch.testing.assert_close(position_code(2, 2), expected)
