"""One row of measurement, the same for tokens and attention, in every table and file."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from wellcond.linalg import Spectrum, spectrum


@dataclasses.dataclass(frozen=True)
class Row:
    """Condition numbers at one place, averaged over the matrices of a batch.

    Attributes:
        step: optimizer step of the measurement.
        site: ``"tokens"`` (what enters the first block), ``"conditioned.before"`` and ``"conditioned.after"``
            (either side of an attached correction), ``"attention.output"`` (a head's softmax(QKᵀ/√d)V,
            N × d_head) or ``"attention.weights"`` (its softmax matrix, N × N).
        layer: index among the model's self-attention layers, from 0; None for tokens.
        head: index of the head; None for tokens.
        kappa: κ, arithmetic mean over matrices as in the paper's figures; inf if one is rank-deficient.
        kappa_pinv: κ⁺ = σ₁/σ_r, arithmetic mean.
        rank: the smallest numerical rank.
        sigma_max, sigma_min: arithmetic means of the extreme singular values.
        module: dotted path of the module measured.
        samples: how many matrices were averaged; matrices without real tokens are left out.
    """

    step: int
    site: str
    layer: int | None
    head: int | None
    kappa: float
    kappa_pinv: float
    rank: int
    sigma_max: float
    sigma_min: float
    module: str
    samples: int

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; κ may be ``float("inf")``."""
        return dataclasses.asdict(self)


Reading = tuple[Spectrum, Tensor]
"""Spectra of shape ``(B,)`` or ``(B, heads)``, and which of the B matrices have a real token at all."""


def read(matrices: Tensor, mask: Tensor | None) -> Reading:
    """Spectra of ``(..., N, d)`` at once, so that no activation outlives its layer. ``mask`` ``(..., N)``."""
    spectra = spectrum(matrices.detach(), mask)
    present = torch.ones_like(spectra.rank, dtype=torch.bool) if mask is None else mask.any(-1)
    return spectra, present


def summarise(reading: Reading) -> dict[str, Any]:
    """The averaged fields of a `Row` from spectra of any shape."""
    spectra, present = reading
    count = int(present.sum())

    def mean(values: Tensor) -> float:
        return values[present].double().mean().item() if count else float("nan")

    return {
        "kappa": mean(spectra.kappa),
        "kappa_pinv": mean(spectra.kappa_pinv),
        "rank": int(spectra.rank[present].min()) if count else -1,
        "sigma_max": mean(spectra.sigma_max),
        "sigma_min": mean(spectra.sigma_min),
        "samples": count,
    }
