"""Products of X in float64, by blocks of rows: XᵀX, which squares κ, and X·M; products and eigenproblems on the small
side. X ``(b, N, d)`` of any float dtype.

On a CPU by numpy, where installed: its OpenBLAS takes half the time of torch's MKL on an AMD processor, and XᵀX again
half, being symmetric.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wellcond.parallel import large_sample, numpy_and_its_blas

BLOCK_ENTRIES = 1 << 17
"""Of a float64 copy: 1 MiB stays in cache. Beyond d = 256 a block has 2d rows, so that the d×d matrix that every
block goes through costs less than the block's own work; but never more than half of all."""

NUMPY_EIGH = 160
"""From this d on numpy's `eigh` takes 0.8 to 0.9 of the time of torch's."""


def power_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """The exponent ``(...)`` of the largest entry of every matrix, 0 where it is not finite, and where that is."""
    largest = torch.maximum(x.amax((-2, -1)), -x.amin((-2, -1)))
    bad = ~largest.isfinite()
    return torch.where(bad, 0, torch.frexp(largest.double()).exponent), bad


def to_float64(x: Tensor, scale: Tensor | None) -> Tensor:
    """X·2^-scale in float64, in two steps because 2^-scale itself can overflow for subnormal numbers."""
    if scale is None:
        return x.double()
    half = (-scale) // 2
    one = torch.ones_like(scale, dtype=torch.float64)
    return (
        x.double()
        * torch.ldexp(one, half)[..., None, None]
        * torch.ldexp(one, -scale - half)[..., None, None]
    )


def gram_matrix(x: Tensor, scale: Tensor | None, basis: Tensor | None = None) -> Tensor:
    """XᵀX, or (XB)ᵀ(XB) with B ``(d, k)``, of X·2^-scale: ``(b, d, d)`` or ``(b, k, k)``."""
    side = x.shape[-1] if basis is None else basis.shape[-1]
    gram = x.new_zeros((len(x), side, side), dtype=torch.float64)
    numpy = _numpy_for(x, scale)
    if numpy is not None and basis is None:
        for a, g in zip(x.detach().numpy(), gram.numpy(), strict=True):
            _add_squares(numpy, a, g)
        return gram
    for rows in _row_blocks(x):
        y = to_float64(x[:, rows], scale)
        y = y if basis is None else y @ basis
        gram += product(y.mT, y)
    return gram


def apply(x: Tensor, scale: Tensor | None, matrix: Tensor, out: Tensor) -> None:
    """``out`` = X·2^-scale·M, M ``(b, d, k)``."""
    numpy = _numpy_for(x, scale)
    if numpy is not None:
        for a, m, f in zip(x.detach().numpy(), matrix.numpy(), out.numpy(), strict=True):
            _multiply(numpy, a, m, f)
        return
    for rows in _row_blocks(x):
        out[:, rows] = product(to_float64(x[:, rows], scale), matrix)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A·B; numpy sees where it is WWᵀ, and computes half."""
    numpy = _numpy_on(a.device)
    if numpy is None:
        return a @ b
    result = a.new_empty((*b.shape[:-2], a.shape[-2], b.shape[-1]))
    with numpy.errstate(all="ignore"):  # what is not finite is told apart later
        numpy.matmul(a.numpy(), b.numpy(), out=result.numpy())
    return result


def symmetric_square(w: Tensor) -> Tensor:
    """WWᵀ."""
    return product(w, w.mT)


def eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices ``(..., d, d)``, float64."""
    numpy = _numpy_on(gram.device)
    if numpy is None or gram.shape[-1] < NUMPY_EIGH:
        eigenvalues, v = torch.linalg.eigh(gram)
        return eigenvalues, v
    eigenvalues, v = numpy.linalg.eigh(gram.numpy())
    return torch.from_numpy(eigenvalues), torch.from_numpy(v)


def _numpy_on(device: torch.device) -> Any:
    """numpy, where it is installed, on a CPU; else None."""
    found = numpy_and_its_blas()
    return None if found is None or device.type != "cpu" else found[0]


def _numpy_for(x: Tensor, scale: Tensor | None) -> Any:
    """The same, where X's samples are large and need no scaling."""
    return _numpy_on(x.device) if large_sample(x) and scale is None else None


def _row_blocks(x: Any, entries: int = BLOCK_ENTRIES) -> list[slice]:
    """Rows of ``(..., N, d)`` that are made float64 together, of all samples at once; all blocks alike."""
    n, d = x.shape[-2:]
    rows = max(entries // max(1, math.prod(x.shape[:-2]) * d), min(2 * d, n // 2), 1)
    count = max(1, -(-n // max(1, round(n / rows))))
    return [slice(start, min(start + count, n)) for start in range(0, n, count)]


def _add_squares(numpy: Any, a: Any, gram: Any) -> None:
    """gram += aᵀa, in few long calls of numpy: see `wellcond.decompositions.TOGETHER`."""
    blocks = _row_blocks(a)
    space, result = _space_like(a, blocks[0].stop), _space(*gram.shape)
    with numpy.errstate(all="ignore"):
        for rows in blocks:
            y = space[: rows.stop - rows.start]
            numpy.copyto(y, a[rows])
            gram += numpy.matmul(y.T, y, out=result)


def _space(rows: int, columns: int) -> Any:
    """An empty float64 array; torch's memory, so that it is counted with the rest."""
    return torch.empty(rows, columns, dtype=torch.float64).numpy()


def _space_like(a: Any, rows: int) -> Any:
    """Room for ``rows`` of ``a`` in float64 and in its order."""
    return _space(a.shape[1], rows).T if a.flags.f_contiguous else _space(rows, a.shape[1])


def _multiply(numpy: Any, a: Any, matrix: Any, out: Any) -> None:
    """out = a·matrix."""
    blocks = _row_blocks(a, BLOCK_ENTRIES // 2)  # half for the result
    space, result = _space_like(a, blocks[0].stop), _space(blocks[0].stop, matrix.shape[1])
    with numpy.errstate(all="ignore"):
        for rows in blocks:
            count = rows.stop - rows.start
            numpy.copyto(space[:count], a[rows])
            out[rows] = numpy.matmul(space[:count], matrix, out=result[:count])
