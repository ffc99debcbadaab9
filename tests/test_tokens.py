"""The correction C and X + C: equivariance, masks, dtypes, gradients, compilation and memory."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellcond.config import ConditioningConfig
from wellcond.linalg import Method, spectrum
from wellcond.tokens import (
    TokenConditioner,
    conditioned_tokens,
    correction,
    frobenius_ratio,
)

METHODS = get_args(Method)
BOUND = 2.002

shapes = st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))
seeds = st.integers(0, 2**31 - 1)
scales = st.floats(1e-15, 1e15)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(random(n, n, seed=seed)).Q


def kappa(y: Tensor) -> Tensor:
    sigma = torch.linalg.svdvals(y.double())
    return sigma[..., 0] / sigma[..., -1]


def saved_bytes(function: Any, x: Tensor) -> int:
    """Bytes kept for backward, each storage counted once."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(x)
    return sum(sizes.values())


# ---------------------------------------------------------------------------------------- Theorem 4.4


@pytest.mark.parametrize("method", METHODS)
@given(shape=shapes, seed=seeds)
@settings(max_examples=15, deadline=None)
def test_theorem_4_4(method: Method, shape: tuple[int, int, int], seed: int) -> None:
    x = random(*shape, seed=seed, dtype=torch.float32)
    y = conditioned_tokens(x, method=method)
    before, after = spectrum(x), spectrum(y)
    assert (after.kappa_pinv <= BOUND).all()
    expected = 2 * before.sigma_max / (before.sigma_max + before.sigma_min)
    torch.testing.assert_close(after.kappa[before.rank == min(shape[1:])],
                               expected[before.rank == min(shape[1:])], rtol=2e-3, atol=0)  # fmt: skip


def test_worked_by_hand() -> None:
    x = torch.diag(torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(correction(x), 3 * torch.eye(2))
    torch.testing.assert_close(conditioned_tokens(x), torch.diag(torch.tensor([6.0, 4.0])))


@pytest.mark.parametrize("method", METHODS)
@given(shape=shapes, seed=seeds, scale=scales)
@settings(max_examples=15, deadline=None)
def test_homogeneous(method: Method, shape: tuple[int, int, int], seed: int, scale: float) -> None:
    """C(aX) = aC(X) for every a, negative ones too. A power of two changes no rounding, so κ plays no part."""
    x = random(*shape, seed=seed, dtype=torch.float32)
    power = 2.0 ** round(torch.tensor(scale).log2().item())
    c = correction(x, method=method)
    torch.testing.assert_close(correction(x * power, method=method) / power, c, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(correction(-x, method=method), -c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18, 1e20])
def test_a6_any_scale(method: Method, scale: float) -> None:
    x = random(6, 4, dtype=torch.float32)
    torch.testing.assert_close(
        correction(x * scale, method=method).double() / scale, correction(x, method=method).double(),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
def test_equivariant_under_permutations_and_rotations(method: Method, shape: tuple[int, int]) -> None:
    x = random(*shape)
    c = correction(x, method=method)
    rows = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(correction(x[rows], method=method), c[rows], atol=1e-9, rtol=0)
    left, right = orthogonal(shape[0], 2), orthogonal(shape[1], 3)
    torch.testing.assert_close(
        correction(left @ x @ right, method=method), left @ c @ right, atol=1e-9, rtol=0
    )
    torch.testing.assert_close(correction(x.mT, method=method), c.mT, atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_zero_rows_get_zero_corrections(method: Method) -> None:
    x = random(3, 7, 4)
    x[:, 2] = 0
    assert correction(x, method=method)[:, 2].abs().max() < 1e-12


# ------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("null_space", ["range", "complete"])
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_masked_rows_change_nothing_and_get_nothing(
    method: Method, null_space: Any, data: st.DataObject
) -> None:
    n, d = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    x = random(n, d, seed=data.draw(seeds))
    dirty = torch.where(keep[:, None], x, 1e6 * random(n, d, seed=5))
    dirty[~keep, :1] = torch.nan
    c = correction(dirty, keep, method=method, null_space=null_space)
    assert torch.equal(c[~keep], torch.zeros_like(c[~keep]))
    alone = correction(x[keep], method=method, null_space=null_space)
    torch.testing.assert_close(c[keep], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rescale", ["none", "frobenius"])
def test_masked_rows_come_back_as_they_were(rescale: Any) -> None:
    x = random(2, 5, 3, dtype=torch.float32)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    y = conditioned_tokens(x, mask, rescale=rescale)
    assert torch.equal(y[1, 2:], x[1, 2:])
    torch.testing.assert_close(y[1, :2], conditioned_tokens(x[1, :2], rescale=rescale))


def test_gradient_of_masked_rows_is_that_of_the_identity() -> None:
    x = random(5, 3).requires_grad_()
    mask = torch.tensor([True, True, True, True, False])
    weight = random(5, 3, seed=1)
    (conditioned_tokens(x, mask, gradient="exact") * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[4], weight[4])
    assert not torch.allclose(x.grad[:4], weight[:4])


def test_a_fully_masked_sample() -> None:
    x = random(2, 5, 3)
    mask = torch.tensor([[False] * 5, [True] * 5])
    assert torch.equal(correction(x, mask)[0], torch.zeros(5, 3).double())
    assert torch.equal(conditioned_tokens(x, mask, rescale="frobenius")[0], x[0])


# --------------------------------------------------------------------------------------------- rescale


@given(shapes, seeds)
@settings(max_examples=30, deadline=None)
def test_frobenius_keeps_norm_and_kappa(shape: tuple[int, int, int], seed: int) -> None:
    x = random(*shape, seed=seed)
    y = conditioned_tokens(x, rescale="frobenius")
    torch.testing.assert_close(torch.linalg.matrix_norm(y), torch.linalg.matrix_norm(x))
    torch.testing.assert_close(kappa(y), kappa(conditioned_tokens(x)), rtol=1e-6, atol=0)


def test_frobenius_ratio_neither_overflows_nor_divides_by_zero() -> None:
    big = torch.full((2, 2), 1e38)
    assert frobenius_ratio(big, 2 * big) == 0.5
    assert frobenius_ratio(torch.zeros(2, 2), torch.zeros(2, 2)) == 1
    assert frobenius_ratio(torch.full((2, 2), 1e-40), torch.full((2, 2), 4e-40)) == pytest.approx(
        0.25, rel=1e-3
    )


def test_frobenius_in_constant_mode_is_a_constant() -> None:
    x = random(4, 3).requires_grad_()
    y = conditioned_tokens(x, rescale="frobenius")
    weight = random(4, 3, seed=1)
    (y * weight).sum().backward()
    ratio = torch.linalg.matrix_norm(x) / torch.linalg.matrix_norm(conditioned_tokens(x))
    torch.testing.assert_close(x.grad, ratio.detach() * weight)


# ---------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_in_dtype_out_and_accurate_to_it(method: Method, dtype: torch.dtype) -> None:
    x = random(2, 9, 4).to(dtype)
    c, y = correction(x, method=method), conditioned_tokens(x, method=method)
    assert c.dtype == y.dtype == dtype
    reference = conditioned_tokens(x.double(), method="svd")
    torch.testing.assert_close(y.double(), reference, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_autocast_does_not_reach_inside(method: Method) -> None:
    x = random(2, 9, 4, dtype=torch.float32)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conditioned_tokens(leaf, method=method, gradient="exact")
        assert y.dtype == torch.float32
        y.square().sum().backward()
    torch.testing.assert_close(y, conditioned_tokens(x, method=method), atol=1e-5, rtol=1e-5)
    plain = x.clone().requires_grad_()
    conditioned_tokens(plain, method=method, gradient="exact").square().sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_b3_fp16_does_not_overflow_on_the_way(method: Method) -> None:
    x = (random(32, 16) * 1e3).half()
    c = correction(x, method=method)
    assert c.isfinite().all()
    reference = correction(x.float(), method="svd")
    assert (c.float() - reference).norm() <= 2e-2 * reference.norm()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rescale", ["none", "frobenius"])
def test_b4_never_aliases_never_mutates(method: Method, dtype: torch.dtype, rescale: Any) -> None:
    x = random(6, 4).to(dtype)
    before = x.clone()
    for result in (
        correction(x, method=method),
        conditioned_tokens(x, method=method, rescale=rescale),
    ):
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        result.fill_(7)
        assert torch.equal(x, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 4)])
def test_a14_empty(method: Method, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    assert correction(x, method=method).shape == shape
    y = conditioned_tokens(x, method=method, rescale="frobenius", gradient="exact")
    assert y.shape == shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_nan_policy() -> None:
    x = random(3, 5, 4, dtype=torch.float32)
    x[1, 0, 0] = torch.nan
    for rescale in ("none", "frobenius"):
        y = conditioned_tokens(x, rescale=rescale)  # type: ignore[arg-type]
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()


# ------------------------------------------------------------------------------------------- gradients


def test_constant_gradient_is_the_identity() -> None:
    x = random(2, 6, 4).requires_grad_()
    weight = random(2, 6, 4, seed=1)
    (conditioned_tokens(x) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)
    assert not correction(x).requires_grad


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rescale", ["none", "frobenius"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (2, 5, 3)])
def test_gradcheck_exact(method: Method, rescale: Any, shape: tuple[int, ...]) -> None:
    x = random(*shape).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: conditioned_tokens(t, method=method, rescale=rescale, gradient="exact"),
        (x,),
    )


@pytest.mark.parametrize("method", METHODS)
def test_a13_second_derivative_raises_or_is_right(method: Method) -> None:
    x = random(5, 3).requires_grad_()
    loss = conditioned_tokens(x, method=method, gradient="exact").square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient='constant'"):
        grad.sum().backward()
    # In constant mode the second derivative is that of x + const.
    (grad,) = torch.autograd.grad(conditioned_tokens(x, method=method).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 6 * conditioned_tokens(x, method=method).detach())


@pytest.mark.parametrize("method", METHODS)
def test_b9_what_is_kept_for_backward(method: Method) -> None:
    x = random(197, 64, dtype=torch.float32).requires_grad_()
    size = x.untyped_storage().nbytes()
    assert saved_bytes(lambda t: conditioned_tokens(t, method=method), x) <= 2 * size
    assert saved_bytes(lambda t: conditioned_tokens(t, method=method, gradient="exact"), x) <= 4 * size


# ----------------------------------------------------------------------------------- transforms, modules


@pytest.mark.parametrize("method", METHODS)
def test_a13_vmap(method: Method) -> None:
    x = random(4, 6, 3)
    found = torch.vmap(lambda t: conditioned_tokens(t, method=method, gradient="exact"))(x)
    torch.testing.assert_close(found, conditioned_tokens(x, method=method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gradient", ["constant", "exact"])
def test_a12_compile_fullgraph(method: Method, gradient: Any) -> None:
    torch._dynamo.reset()

    def function(t: Tensor) -> Tensor:
        return conditioned_tokens(t, method=method, gradient=gradient, rescale="frobenius")

    x = random(2, 9, 4, dtype=torch.float32)
    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_b7_at_most_two_compiles_over_changing_n(method: Method) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda t: conditioned_tokens(t, method=method), fullgraph=True, backend=counter)
    for n in range(6, 21):
        x = random(2, n, 5, seed=n, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), conditioned_tokens(x, method=method), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


def test_c2_the_module_has_no_state_and_no_mode() -> None:
    module = TokenConditioner(ConditioningConfig(rescale="frobenius"))
    assert not module.state_dict()
    assert not list(module.parameters())
    assert not list(module.buffers())
    x = random(2, 6, 4, dtype=torch.float32)
    assert torch.equal(module.train()(x), module.eval()(x))
    assert torch.equal(module(x), conditioned_tokens(x, rescale="frobenius"))
    assert "rescale='frobenius'" in repr(module)


def test_the_module_passes_every_option_on() -> None:
    config = ConditioningConfig(method="svd", null_space="complete", rank_tol=0.1, gradient="exact")
    x = random(6, 4).requires_grad_()
    x.data[:, 3] = 0
    mask = torch.tensor([True] * 5 + [False])
    y = TokenConditioner(config)(x, mask)
    torch.testing.assert_close(
        y,
        conditioned_tokens(x, mask, method="svd", null_space="complete", rank_tol=0.1, gradient="exact"),
    )


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match=r"'constant'.*'full'"):
        correction(torch.ones(2, 2), gradient="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'frobenius'.*'max'"):
        conditioned_tokens(torch.ones(2, 2), rescale="max")  # type: ignore[arg-type]
