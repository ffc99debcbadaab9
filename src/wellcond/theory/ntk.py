"""The empirical neural tangent kernel of a model, whose condition number the paper argues with but does not measure.

For outputs f(x) ∈ R^c and parameters θ, Θ(x, x') = ∂f(x)/∂θ (∂f(x')/∂θ)ᵀ ∈ R^{c×c}. Over n samples it is one
matrix of nc×nc; gradient descent on a squared loss, linearised at θ, decays along its eigenvectors at rates
proportional to its eigenvalues. κ(Θ) is therefore the number that a condition number of tokens stands for.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel


def tangent_kernel(model: nn.Module, x: Tensor, *, chunk: int = 16) -> Tensor:
    """The empirical tangent kernel of ``model`` on samples ``x``, by ``torch.func``.

    The gradient is the one that training sees: under ``gradient="constant"`` the correction is a constant.

    Args:
        model: maps ``(B, ...)`` to outputs ``(B, c)``, each sample on its own (no batch norm in train mode).
            Its mode, parameters and gradients are left alone; a dropout must be off (``model.eval()``).
        x: samples ``(n, ...)``.
        chunk: how many samples' Jacobians are computed at once; n·c·(number of parameters) numbers are kept.

    Returns:
        Θ ``(n·c, n·c)`` float64, symmetric; row i·c + k is output k of sample i.

    Raises:
        ValueError: outputs are not ``(B, c)``, or no parameter needs a gradient.

    >>> import torch
    >>> tangent_kernel(torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [4.0, -3.0]])).tolist()
    [[25.0, 0.0], [0.0, 25.0]]
    """
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    others = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    others |= {name: b.detach() for name, b in model.named_buffers()}
    if not parameters:
        raise ValueError(f"no parameter of this {type(model).__name__} needs a gradient")

    def outputs(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        result = functional_call(model, (values, others), (sample[None],))
        if not isinstance(result, Tensor) or result.ndim != 2:
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"the kernel needs outputs (B, c), this {type(model).__name__} returns {shape}")
        return result[0]

    per_sample = vmap(jacrev(outputs), in_dims=(None, 0), chunk_size=chunk)
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # the fused kernels have no batching rule: vmap would loop over samples
        jacobians = per_sample(parameters, x)
    rows: Tensor | None = None
    for jacobian in jacobians.values():  # (n, c, *shape): one parameter at a time, to hold no second copy
        flat = jacobian.flatten(2).flatten(0, 1).double()
        rows = flat @ flat.mT if rows is None else rows + flat @ flat.mT
    assert rows is not None
    return (rows + rows.mT) / 2
