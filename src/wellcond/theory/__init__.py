"""The paper's statements, executable: both sides of each, whether it applies, whether it holds."""

from wellcond.theory.ntk import tangent_kernel
from wellcond.theory.on_model import Tightness, on_model, propagation, run
from wellcond.theory.statements import (
    Statement,
    conditioned_attention,
    conditioned_bound,
    conditioning,
    fixed_correction,
    keeps_rank,
    linear_attention,
    product,
    softmax_attention,
    split_heads,
    values_attention,
)

__all__ = [
    "Statement",
    "Tightness",
    "conditioned_attention",
    "conditioned_bound",
    "conditioning",
    "fixed_correction",
    "keeps_rank",
    "linear_attention",
    "on_model",
    "product",
    "propagation",
    "run",
    "softmax_attention",
    "split_heads",
    "tangent_kernel",
    "values_attention",
]
