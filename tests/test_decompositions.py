"""The engine itself: checks, fallbacks, threads, precision, and `newton` on machines without SVD."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond import decompositions, float64, parallel
from wellcond import newton as newton_module
from wellcond.float64 import apply, gram_matrix
from wellcond.linalg import choose_method, polar, spectrum
from wellcond.newton import SCHEDULES, SORTING, THRESHOLD, evaluate, newton, optimal_quintic
from wellcond.parallel import for_each, parts_of
from wellcond.tokens import conditioned_tokens


def with_sigma(sigma: Tensor, n: int, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    k = len(sigma)
    u = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64)).Q
    return ((u * sigma.double()) @ v.mT).to(dtype)


def isometry_error(factor: Tensor, rank: int) -> float:
    values = torch.linalg.svdvals(factor.double())
    return max(
        float((values[..., :rank] - 1).abs().max()),
        float(values[..., rank:].max() if rank < values.shape[-1] else 0),
    )


# -------------------------------------------------------------------------------------------------- gram


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("with_numpy", [False, True])
@pytest.mark.parametrize(("n", "d"), [(7, 3), (300, 130), (2500, 128), (64, 64)])
def test_products_in_float64_are_right_over_blocks(
    n: int, d: int, with_numpy: bool, by_columns: bool, monkeypatch: Any
) -> None:
    """With numpy (extra ``fast``) and without it."""
    if not with_numpy:
        monkeypatch.setattr(float64, "numpy_and_its_blas", lambda: None)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, d, n) if by_columns else (2, n, d), generator=generator)
    x = x.mT if by_columns else x
    found = gram_matrix(x, None)
    torch.testing.assert_close(found, x.double().mT @ x.double())
    assert (found - found.mT).abs().max() < 1e-10
    matrix, out = torch.randn(2, d, d, generator=generator, dtype=torch.float64), torch.empty(2, n, d)
    apply(x, None, matrix, out)
    torch.testing.assert_close(out, (x.double() @ matrix).float())


def test_numpy_is_used_and_not_needed(monkeypatch: Any) -> None:
    assert parallel.numpy_and_its_blas() is not None
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    parallel.numpy_and_its_blas.cache_clear()
    try:
        assert parallel.numpy_and_its_blas() is None
        x = with_sigma(torch.logspace(0, -2, 100), 400, 100)
        assert isometry_error(polar(x, method="gram").factor, 100) < 5e-5
    finally:
        parallel.numpy_and_its_blas.cache_clear()


@pytest.mark.parametrize("shape", [(30, 6), (300, 130), (300, 170)])
def test_what_is_not_finite_is_no_warning_of_numpys(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    x[1, 5, 4] = torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factor = polar(x, method="gram").factor
    assert factor[1].isnan().all()
    assert factor[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kappa_log", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("shape", [(400, 100), (100, 400), (260, 256)])
def test_gram_is_orthonormal_without_the_svd(
    kappa_log: int, shape: tuple[int, int], monkeypatch: Any
) -> None:
    """Large enough to be worked on alone, in float32 where κ allows it, and polished where it does not."""
    monkeypatch.setitem(decompositions.DECOMPOSITIONS, "svd", None)
    monkeypatch.setattr(decompositions, "svd_polar", None)
    x = with_sigma(torch.logspace(0, -kappa_log, 100), *shape)
    factor = (
        polar(x, method="gram", rank_tol=1e-9).factor if min(shape) == 100 else polar(x, method="gram").factor
    )
    assert isometry_error(factor, 100) < 5e-5


def test_at_the_end_of_what_the_gram_matrix_knows_polishing_is_enough(monkeypatch: Any) -> None:
    """κ = 2.5e6: directions a little above the smallest are wrong by as much as the check allows, too."""
    monkeypatch.setattr(decompositions, "svd_polar", None)
    generator = torch.Generator().manual_seed(2)
    left = torch.linalg.qr(torch.randn(60, 196, 180, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(60, 180, 180, generator=generator, dtype=torch.float64)).Q
    x = ((left * torch.logspace(0, -6.4, 180, dtype=torch.float64)) @ right.mT).float()
    factor, _, rank = polar(x, method="gram")
    assert (rank == 180).all()
    assert isometry_error(factor, 180) < 2e-4


@pytest.mark.parametrize("method", ["svd", "gram", "newton"])
@pytest.mark.parametrize("kappa", [30.0, 300.0, 900.0])
def test_large_rank_deficient_samples_keep_their_null_space(method: Any, kappa: float) -> None:
    """Patches of 4×4 pixels: 3136×128 of rank 49. X + C in float32 has no directions beyond those of X."""
    x = with_sigma(500 * torch.logspace(0, -math.log10(kappa), 49, dtype=torch.float64), 3136, 128)
    assert spectrum(x).rank == 49
    found = spectrum(conditioned_tokens(x, method=method))
    assert found.rank == 49
    assert found.kappa_pinv <= 2.002


def test_gram_finds_directions_that_the_gram_matrix_has_lost() -> None:
    """κ = 1e9 in float64: XᵀX knows σ/σ₁ down to 4e-8 only."""
    x = with_sigma(torch.logspace(0, -9, 10, dtype=torch.float64), 40, 10, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # falling back is allowed, being wrong is not
        result = polar(x, method="gram")
    assert result.rank == 10
    assert isometry_error(result.factor, 10) < 5e-4


def test_a10_a_wrong_eigendecomposition_is_noticed_repaired_and_reported_once(monkeypatch: Any) -> None:
    honest = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (honest(m)[0], honest(m)[1].roll(1, -1)))
    x = torch.randn(5, 30, 6, generator=torch.Generator().manual_seed(1))
    with pytest.warns(UserWarning, match="method='gram'.*5 of 5 matrices of shape \\(30, 6\\)") as caught:
        factor = polar(x, method="gram").factor
    assert len([w for w in caught if "done again" in str(w.message)]) == 1
    torch.testing.assert_close(factor, polar(x, method="svd").factor)


@pytest.mark.parametrize("kappa_log", [1, 4, 6])
@pytest.mark.parametrize("d", [130, 170])
def test_a_wrong_eigendecomposition_is_noticed_whatever_is_formed_from_it(
    kappa_log: int, d: int, monkeypatch: Any
) -> None:
    """In float32, in float64 where the check is made beside X, and in float64 where it is made on the factor."""
    honest = decompositions.eigh

    def turned(gram: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = honest(gram)
        mixed = vectors[..., :2] @ torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
        return values, torch.cat([mixed, vectors[..., 2:]], -1)

    x = with_sigma(torch.logspace(0, -kappa_log, d, dtype=torch.float64), 400, d)[None]
    expected = polar(x, method="svd").factor
    assert isometry_error(polar(x, method="gram").factor, d) < 5e-5
    monkeypatch.setattr(decompositions, "eigh", turned)
    with pytest.warns(UserWarning, match="1 of 1"):
        factor = polar(x, method="gram").factor
    torch.testing.assert_close(factor, expected)


def test_a_lone_bad_sample_does_not_touch_its_neighbours(monkeypatch: Any) -> None:
    honest = torch.linalg.eigh

    def spoiled(m: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = honest(m)
        vectors[1] = vectors[1].roll(1, -1)
        return values, vectors

    x = torch.randn(3, 30, 6, generator=torch.Generator().manual_seed(1))
    clean = polar(x, method="gram").factor
    monkeypatch.setattr(torch.linalg, "eigh", spoiled)
    with pytest.warns(UserWarning, match="1 of 3"):
        factor = polar(x, method="gram").factor
    assert torch.equal(factor[[0, 2]], clean[[0, 2]])
    torch.testing.assert_close(factor[1], clean[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["gram", "svd", "newton"])
def test_large_samples_of_every_kind_are_the_same_alone_and_side_by_side(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are formed in float32, some in float64, one needs polishing, one is not finite: each decides for itself."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(300, 130, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(130, 130, generator=generator, dtype=torch.float64)).Q
    sigma = torch.stack([torch.logspace(0, -k, 130, dtype=torch.float64) for k in (1, 2, 4, 6, 1, 3)])
    sigma[4, 40:] = 0
    x = ((left * sigma[:, None, :]) @ right.mT).float()
    x[5, 7, 3] = torch.nan
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # all in one part, whatever the machine
    assert len(parts_of(x, 10**9, together=8)) < len(x) == len(parts_of(x, 10**9))
    whole = polar(x, method=method)
    for i in range(len(x)):
        alone = polar(x[i], method=method)
        torch.testing.assert_close(alone.factor, whole.factor[i], atol=1e-6, rtol=0, equal_nan=True)
        assert alone.rank == whole.rank[i]


# ----------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("count", [0, 1, 7, 64])
@pytest.mark.parametrize("flops", [0, 10**12])
@pytest.mark.parametrize("shape", [(65, 17), (196, 196), (50000, 64)])
def test_parts_are_all_samples_once_and_as_many_for_every_thread(
    count: int, flops: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    parts = parts_of(torch.empty(count, *shape), flops, together=8)
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    if flops:
        assert len(parts) == count or len(parts) % 4 == 0
    sizes = [len(range(count)[part]) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("flops", [0, 10**12])
def test_threads_leave_the_process_as_it_was_and_do_everything_once(flops: int) -> None:
    code = (
        f"flops = {flops}"
        + """
import torch
from wellcond.parallel import for_each
torch.set_num_threads(2)
seen = []
def do(part):
    seen.append(torch.get_num_threads())
    return part.start
assert for_each(do, [slice(i, i + 1) for i in range(8)], torch.device("cpu"), flops) == list(range(8))
assert seen == [1] * 8, seen
assert torch.get_num_threads() == 2
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(torch.get_num_threads).result() == 2
"""
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "2"}, timeout=120
    )


def test_callers_that_overlap_leave_the_threads_of_numpys_blas_as_they_were() -> None:
    import threadpoolctl

    def found() -> list[int]:
        return [
            pool["num_threads"]
            for pool in threadpoolctl.threadpool_info()
            if pool["internal_api"] == "openblas"
        ]

    before = found()
    first, second = parallel.blas_threads(1), parallel.blas_threads(3)
    first.__enter__()
    second.__enter__()
    assert before
    assert set(found()) == {3}
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert found() == before


@pytest.mark.parametrize("flops", [0, 10**12])
def test_an_error_in_a_thread_arrives(flops: int) -> None:
    def do(part: slice) -> int:
        raise ValueError(f"part {part.start}")

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="part 0"):
            for_each(do, [slice(0, 1), slice(1, 2)], torch.device("cpu"), flops)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_works_in_a_forked_child_after_use_in_the_parent() -> None:
    code = """
import os, torch
torch.set_num_threads(1)
from wellcond import polar
x = torch.randn(4, 200, 180)
polar(x)
child = os.fork()
if child == 0:
    polar(x)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ------------------------------------------------------------------------------------------------ newton


class NoDecompositions(TorchDispatchMode):
    """A device that knows matrix products only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in ("svd", "eigh", "wellcond.decompose", "linalg_qr")):
            raise NotImplementedError(f"{name} is missing on this device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradient", ["constant", "exact"])
def test_a11_newton_needs_matrix_products_only(gradient: Any) -> None:
    x = torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.autograd.grad(conditioned_tokens(x, method="svd", gradient=gradient).square().sum(), x)[
        0
    ]
    with NoDecompositions():
        conditioned_tokens(x, method="newton", gradient=gradient).square().sum().backward()
        newton(x.detach(), torch.full((3,), 1e-6), -1.0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
    with NoDecompositions(), pytest.raises(NotImplementedError, match="decompose"):
        conditioned_tokens(x, method="svd")


@pytest.mark.parametrize("rank", [1, 7, 20, 32])
def test_newton_finds_the_rank_without_eigenvalues(rank: int) -> None:
    x = with_sigma(torch.logspace(0, -3, rank), 200, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = polar(x, method="newton")
    assert result.rank == rank
    assert isometry_error(result.factor, rank) < 1e-5


def test_newton_repairs_what_stays_between_zero_and_one() -> None:
    """A singular value on the tolerance itself is sorted neither way; it must be noticed."""
    sigma = torch.tensor([1.0, 0.5, 0.2, 0.1])
    found_repair = False
    for tol in torch.linspace(0.1 * 0.98, 0.1 * 1.02, 9).tolist():
        x = with_sigma(sigma, 20, 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = polar(x, method="newton", rank_tol=tol)
        found_repair |= any("method='newton'" in str(w.message) for w in caught)
        assert isometry_error(result.factor, int(result.rank)) < 1e-3
    assert found_repair


def test_a_turned_sign_is_noticed() -> None:
    """An orthogonal factor with one direction turned is a perfect isometry; FᵀX is not semidefinite then."""
    x = with_sigma(torch.tensor([1.0, 0.5, 0.2]), 9, 3)[None]
    honest = newton(x, torch.full((1,), 1e-6), -1.0)
    assert newton_module.passes(x, honest).item()
    vectors = torch.linalg.svd(x)[2][0, 1]
    turned = honest._replace(factor=honest.factor - 2 * (honest.factor @ vectors)[..., None] * vectors)
    assert isometry_error(turned.factor, 3) < 1e-5
    assert not newton_module.passes(x, turned).item()


def test_a_left_out_direction_is_noticed() -> None:
    x = with_sigma(torch.tensor([1.0, 0.5, 0.2]), 9, 3)[None]
    honest = newton(x, torch.full((1,), 1e-6), -1.0)
    vectors = torch.linalg.svd(x)[2][0, 2]
    short = honest._replace(factor=honest.factor - (honest.factor @ vectors)[..., None] * vectors)
    assert not newton_module.passes(x, short).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_schedule_takes_each_side_of_the_threshold_to_its_end(dtype: torch.dtype) -> None:
    steps, threshold = SCHEDULES[dtype]
    for sigma in torch.logspace(
        torch.log10(torch.tensor(1.05 * threshold)).item(), 0, 400, dtype=torch.float64
    ):
        assert abs(evaluate(steps, sigma.item()) - 1) < 1e-3
    for share in (0.0, 0.1, 0.3, 0.6, 0.9):
        assert abs(evaluate(steps, share * threshold)) < 1e-3
    a, b, c = SORTING
    assert a + b * THRESHOLD**2 + c * THRESHOLD**4 == pytest.approx(1.0)


@pytest.mark.parametrize(("lower", "upper"), [(0.05, 1.0), (0.3, 1.7), (0.9, 1.1), (1.0, 1.0)])
def test_optimal_quintic_equioscillates(lower: float, upper: float) -> None:
    quintic = optimal_quintic(lower, upper)
    points = torch.linspace(lower, upper, 2001, dtype=torch.float64)
    errors = torch.tensor([evaluate((quintic,), p.item()) - 1 for p in points])
    largest = errors.abs().max().item()
    assert abs(errors[0].item()) == pytest.approx(largest, rel=1e-3, abs=1e-9)
    assert abs(errors[-1].item()) == pytest.approx(largest, rel=1e-3, abs=1e-9)
    assert largest <= (1 - lower / upper)


class Conditioned(torch.nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, x: Tensor) -> Tensor:
        return conditioned_tokens(x, method=self.method)


def test_d13_export_newton_and_load_it_again(tmp_path: Path) -> None:
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(
        Conditioned("newton"), (x,), dynamic_shapes={"x": {1: torch.export.Dim("n", min=5)}}
    )
    assert not any("wellcond" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for n in (9, 13):
        tokens = torch.randn(2, n, 4, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(
            loaded(tokens), conditioned_tokens(tokens, method="svd"), atol=1e-5, rtol=1e-5
        )


def test_choose_method() -> None:
    assert choose_method(torch.ones(2, 2))[0] == "gram"
    assert choose_method(torch.ones(2, 2, dtype=torch.float64))[0] == "svd"
    assert choose_method(torch.ones(2, 2, device="meta"))[0] == "newton"


@pytest.mark.parametrize("method", ["gram", "newton"])
def test_a15_the_precision_of_float32_products_is_ours_and_the_flag_the_users(
    method: Any, monkeypatch: Any
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    seen = []
    honest = torch.linalg.vector_norm if method == "gram" else torch.linalg.matrix_norm

    def spy(*args: Any, **options: Any) -> Tensor:
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return honest(*args, **options)

    monkeypatch.setattr(torch.linalg, honest.__name__.removeprefix("linalg_"), spy)
    try:
        x = with_sigma(torch.logspace(0, -2, 96), 400, 96)
        result = polar(x, method=method)
        assert seen
        assert set(seen) == {"ieee"}
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(result.factor, polar(x, method="svd").factor, atol=2e-5, rtol=0)
    assert isometry_error(result.factor, 96) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kappa_log", [2, 4, 6])
def test_gpu_keeps_the_bound_and_the_flags(kappa_log: int) -> None:
    flag = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        x = with_sigma(torch.logspace(0, -kappa_log, 96), 192, 96).cuda()
        result = polar(x, rank_tol=1e-8)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = flag
    assert isometry_error(result.factor.cpu(), 96) < 1e-4
