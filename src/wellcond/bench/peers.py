"""What other software does with the same matrices: time, κ⁺ reached, error of the factor, gradient."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellcond.bench.measures import kappa_of_sum, seconds
from wellcond.linalg import polar


def polar_of(method: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: polar(x, method=method).factor


def svd_factor(x: Tensor) -> Tensor:
    """The naive baseline: autograd through `torch.linalg.svd`."""
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    factor: Tensor = u @ vh
    return factor


def muon_factor(x: Tensor) -> Tensor:
    """Five quintic steps in bfloat16, one matrix after another, as `torch.optim.Muon` does."""
    from torch.optim._muon import _zeropower_via_newtonschulz as steps

    return torch.stack([steps(m, (3.4445, -4.775, 2.0315), 5, 1e-7).to(x.dtype) for m in x])


def scipy_factor(x: Tensor) -> Tensor:
    """`scipy.linalg.polar`, one matrix after another; no gradient."""
    from scipy.linalg import polar as scipy_polar

    return torch.stack([torch.from_numpy(scipy_polar(m.detach().cpu().numpy())[0]) for m in x])


def gram_newton_schulz_factor(x: Tensor) -> Tensor:
    """PyPI gram-newton-schulz in its plain PyTorch form (float16, five Polar Express steps)."""
    from gram_newton_schulz import GramNewtonSchulz  # type: ignore[import-untyped,import-not-found,unused-ignore]

    factor: Tensor = GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)(x)
    return factor.to(x.dtype)


def available() -> dict[str, Callable[[Tensor], Tensor]]:
    """The peers that are installed, ours first."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        f"wellcond {m}": polar_of(m) for m in ("auto", "gram", "newton")
    }
    found["torch.linalg.svd (autograd)"] = svd_factor
    if importlib.util.find_spec("torch.optim._muon"):
        found["torch.optim.Muon steps"] = muon_factor
    if importlib.util.find_spec("gram_newton_schulz"):
        found["gram-newton-schulz"] = gram_newton_schulz_factor
    if importlib.util.find_spec("scipy"):
        found["scipy.linalg.polar"] = scipy_factor
    return found


def gradient(function: Callable[[Tensor], Tensor], device: str) -> str:
    """Whether the gradient is finite where two singular values are equal."""
    x = torch.diag(torch.tensor([2.0, 1.0, 1.0], device=device))[None].requires_grad_()
    try:
        torch.autograd.backward(function(x).sum())
    except RuntimeError:
        return "none"
    return "none" if x.grad is None else "finite" if bool(x.grad.isfinite().all()) else "not finite"


def compare(x: Tensor, rank: int, rounds: int) -> list[dict[str, Any]]:
    """One row per peer for full-rank tokens ``(batch, N, d)``."""
    u, sigma, vh = torch.linalg.svd(x.double(), full_matrices=False)
    exact = u @ vh
    peers = available()
    times = seconds({name: (lambda f=f: f(x)) for name, f in peers.items()}, rounds)  # type: ignore[misc]
    rows = []
    for name, function in peers.items():
        factor = function(x).detach().to(x.device)
        rows.append(
            {
                "peer": name,
                "seconds": times[name],
                "kappa": kappa_of_sum(x, factor, sigma[..., 0], rank),
                "error": float((factor.double() - exact).norm() / exact.norm()),
                "gradient": gradient(function, str(x.device)),
            }
        )
    return rows
