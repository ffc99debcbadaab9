"""Scope "table": E + C(E) for the embedding table E of a language model, applied to the rows that are looked up.

With E = U S Vᵀ (V×d, numerical rank r), C = σ₁ U_r V_rᵀ = E·M, where M = σ₁ V_r S⁻¹ V_rᵀ is a d×d matrix. So a row
e of the table becomes e + e·M: one product per token, whatever the length of the sequence, and no token sees another.
κ⁺(E + C) ≤ 2 (Theorem 4.4 of the paper, for E in place of the tokens).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellcond.config import ConditioningConfig
from wellcond.hooks import TokenHook
from wellcond.linalg import ROUNDING_SAFETY, Method, NullSpace, choose
from wellcond.tokens import conditioned_tokens

GRAM_LIMIT = 1e-5
"""Singular values above this share of σ₁ come out of EᵀE in float64 with a relative error below 1e-5."""


class RowOperator(NamedTuple):
    """M ``(d, d)`` float64 with C = E·M; the numerical rank of E; ‖E‖_F/‖E + C‖_F."""

    matrix: Tensor
    rank: int
    frobenius_ratio: float


@torch.no_grad()
def row_operator(
    table: Tensor, *, method: Method = "auto", null_space: NullSpace = "range", rank_tol: float | None = None
) -> RowOperator:
    """The matrix that turns a row of an embedding table into its correction.

    Args:
        table: E ``(V, d)``, any real floating dtype.
        method: ``"svd"`` takes the singular values from a QR decomposition, every other from EᵀE in float64, and from
            the QR decomposition too where a singular value is too small for that.
        null_space: ``"complete"`` needs a table of full rank, since a completion is not a function of the row.
        rank_tol: see `wellcond.spectrum`.

    Returns:
        RowOperator; full of NaN where the table is not finite.

    Raises:
        ValueError: ``table`` is not a matrix, or ``null_space="complete"`` and its rank is below min(V, d).

    >>> import torch
    >>> found = row_operator(torch.diag(torch.tensor([4.0, 1.0])))
    >>> found.matrix.round().tolist(), found.rank
    ([[1.0, 0.0], [0.0, 4.0]], 2)
    """
    choose("method", method, Method)
    choose("null_space", null_space, NullSpace)
    if table.ndim != 2 or not table.is_floating_point():
        raise ValueError(
            f"an embedding table is a floating matrix (V, d), got {tuple(table.shape)} {table.dtype}"
        )
    rows, d = table.shape
    with torch.autocast(table.device.type, enabled=False):
        e = table.double()
        top = e.abs().max() if e.numel() else e.new_zeros(())
        if not torch.isfinite(top):
            return RowOperator(
                torch.full((d, d), torch.nan, dtype=e.dtype, device=e.device), -1, float("nan")
            )
        e = e / torch.where(top > 0, top, 1.0)  # M does not depend on the scale of E
        sigma, v = right_singular(e, squared=method != "svd")
        sigma_max = sigma.max() if sigma.numel() else e.new_zeros(())
        if rank_tol is None:
            noise = (
                ROUNDING_SAFETY * torch.finfo(table.dtype).eps * (max(rows, 1) ** -0.5 + max(d, 1) ** -0.5)
            )
            tol = noise * sigma.square().sum().sqrt()
        else:
            tol = rank_tol * sigma_max
        inside = (sigma > tol) & (sigma > 0)
        rank = int(inside.sum())
        if null_space == "complete" and rank < min(rows, d):
            raise ValueError(
                f"the embedding table {tuple(table.shape)} has rank {rank} < {min(rows, d)}: null_space='complete' "
                f"would add rows that no function of a token gives; use null_space='range' with scope='table'"
            )
        inverse = torch.where(inside, sigma_max / torch.where(inside, sigma, 1.0), 0.0)
        after = sigma + torch.where(inside, sigma_max, 0.0)
        ratio = float(torch.linalg.vector_norm(sigma) / torch.linalg.vector_norm(after)) if rank else 1.0
        return RowOperator((v * inverse) @ v.mT, rank, ratio)


def right_singular(e: Tensor, *, squared: bool) -> tuple[Tensor, Tensor]:
    """σ ``(k,)`` and V ``(d, k)`` of e ``(V, d)`` float64; from EᵀE where that is accurate and allowed."""
    if squared and e.shape[0] >= e.shape[1]:
        values, v = torch.linalg.eigh(e.mT @ e)
        sigma = values.clamp(min=0).sqrt()
        if bool((sigma >= GRAM_LIMIT * sigma.amax()).all()):
            return sigma, v
    small = torch.linalg.qr(e, mode="r").R if e.shape[0] > e.shape[1] else e
    _, sigma, vh = torch.linalg.svd(small, full_matrices=False)
    return sigma, vh.mT


@torch.library.custom_op("wellcond::refresh_operator", mutates_args=("operator", "ratio", "mark"))
def refresh_operator(
    table: Tensor,
    operator: Tensor,
    ratio: Tensor,
    mark: Tensor,
    training: bool,
    method: str,
    null_space: str,
    rank_tol: float,
) -> None:
    """Bring ``operator`` and ``ratio`` up to date with ``table``; a `rank_tol` below 0 means None.

    ``mark`` says which table they belong to: address, version, whether it was seen in eval mode, and the sums and
    norms of the columns. Version and address alone do not tell in training: ``weight.data.add_`` counts no version,
    and FSDP gathers new weights at the old address. So in training, and once on entering eval, the columns are looked
    at, which reads the table once; in eval after that only address and version are.
    """
    version = -1 if table.is_inference() else table._version
    here = mark.new_tensor([table.data_ptr(), version, float(not training)])
    if not training and version >= 0 and torch.equal(mark[:3], here):
        return
    seen = torch.cat(
        [table.sum(0, dtype=torch.float64), torch.linalg.vector_norm(table, dim=0, dtype=torch.float64)]
    )
    if not torch.equal(mark[3:], seen):
        found = row_operator(
            table,
            method=method,  # type: ignore[arg-type]
            null_space=null_space,  # type: ignore[arg-type]
            rank_tol=None if rank_tol < 0 else rank_tol,
        )
        operator.copy_(found.matrix)
        ratio.fill_(found.frobenius_ratio)
        mark[3:] = seen
    mark[:3] = here


@refresh_operator.register_fake
def _(
    table: Tensor,
    operator: Tensor,
    ratio: Tensor,
    mark: Tensor,
    training: bool,
    method: str,
    null_space: str,
    rank_tol: float,
) -> None:
    return None


class TableConditioner(nn.Module):
    """Rows of E + C(E) from rows of E: ``forward(x, table, ids)``, without parameters or buffers.

    ``gradient="constant"``: M is a constant of the step, so the gradient of the table is that of a plain lookup.
    ``gradient="exact"``: the closed-form derivative of E + C(E), dense over all rows; in training that conditions
    the whole table in every forward. The row of ``padding_idx`` gets no gradient either way.

    >>> import torch
    >>> table = nn.Embedding.from_pretrained(torch.diag(torch.tensor([4.0, 1.0])))
    >>> ids = torch.tensor([1, 0])
    >>> TableConditioner()(table(ids), table, ids)
    tensor([[0., 5.],
            [8., 0.]])
    """

    def __init__(self, config: ConditioningConfig | None = None) -> None:
        super().__init__()
        self.config = config or ConditioningConfig(scope="table")
        self.operator = self.ratio = self.mark = torch.empty(0)

    def forward(self, x: Tensor, module: nn.Embedding, ids: Tensor | None = None) -> Tensor:
        """``x`` ``(..., d)`` looked up in ``module`` by ``ids`` ``(...)``, conditioned."""
        if self.config.gradient == "exact" and torch.is_grad_enabled() and module.weight.requires_grad:
            return self.exact(module, ids)
        self.refresh(module)
        with torch.autocast(x.device.type, enabled=False):
            # Float64, because the error of this product is κ(E) times the rounding error.
            corrected = x + (x.detach().double() @ self.operator).to(
                torch.promote_types(x.dtype, torch.float32)
            )
            if self.config.rescale == "frobenius":
                corrected = corrected * self.ratio
            return corrected.to(x.dtype)

    def refresh(self, module: nn.Embedding) -> None:
        """Recompute M if the table is not the one that it was computed from."""
        table = module.weight.detach()
        d = table.shape[-1]
        if self.operator.device != table.device or self.operator.shape != (d, d):
            with torch.inference_mode(False):  # else they could not be updated in a later training step
                options: dict[str, Any] = {"dtype": torch.float64, "device": table.device}
                self.operator = torch.empty(d, d, **options)
                self.ratio = torch.empty((), **options)
                self.mark = torch.full((2 * d + 3,), torch.nan, **options)
        config = self.config
        rank_tol = -1.0 if config.rank_tol is None else config.rank_tol
        refresh_operator(
            table,
            self.operator,
            self.ratio,
            self.mark,
            module.training,
            config.method,
            config.null_space,
            rank_tol,
        )

    def exact(self, module: nn.Embedding, ids: Tensor | None) -> Tensor:
        """Look up in E + C(E), differentiably."""
        if type(module) is not nn.Embedding or module.sparse or module.scale_grad_by_freq or ids is None:
            raise ValueError(
                f"gradient='exact' of a table needs a plain dense nn.Embedding called with its ids, got "
                f"{module!r}; use gradient='constant'"
            )
        if self.config.null_space == "complete":
            self.refresh(module)  # refuses a table that it cannot complete, as at evaluation
        table: Tensor = module.weight
        if module.padding_idx is not None:
            padding = torch.arange(len(table), device=table.device) == module.padding_idx
            table = torch.where(padding[:, None], table.detach(), table)
        names = ("method", "null_space", "rank_tol", "gradient", "rescale")
        table = conditioned_tokens(table, **{name: getattr(self.config, name) for name in names})
        return functional.embedding(ids, table, module.padding_idx)

    def extra_repr(self) -> str:
        return f"gradient={self.config.gradient!r}, rescale={self.config.rescale!r}"


class TableHook(TokenHook):
    """Conditions what an embedding table returns, inside a call of its model and outside (``inputs_embeds``)."""

    def condition(self, tokens: Tensor, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        assert isinstance(module, nn.Embedding)
        conditioned: Tensor = self.transform(tokens, module, args[0] if args else None)
        return conditioned
