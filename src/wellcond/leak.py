"""leak: how much the outputs for earlier tokens change when later tokens do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.checkpoint import warn_if_forgotten
from wellcond.running import undisturbed


def leak(model: nn.Module, ids: Tensor, *, cut: int | None = None, **inputs: Any) -> float:
    """Change the tokens from ``cut`` on and return the largest change of any earlier logit.

    0 for a causal model as it comes, and with scope "table" or "static"; large with scope "sample"
    (``allow_leak=True``). Two forwards, in eval mode, without gradients.

    Args:
        model: called as ``model(ids, **inputs)``; returns logits ``(B, N, …)``, or an output with ``logits`` or
            ``last_hidden_state``.
        ids: token ids ``(B, N)``, N ≥ 2.
        cut: the first token to change, default the middle.
        inputs: passed on, such as ``attention_mask``.

    Raises:
        ValueError: ``ids`` is not ``(B, N)`` with N ≥ 2, ``cut`` is not inside, all ids are the same one-word
            vocabulary, or the model returns no logits for each token.

    >>> leak(nn.Embedding(5, 3), torch.tensor([[1, 2, 3, 4]]))
    0.0
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(
            f"ids must be (batch, tokens) with at least two tokens, got shape {tuple(ids.shape)}"
        )
    cut = ids.shape[1] // 2 if cut is None else cut
    if not 0 < cut < ids.shape[1]:
        raise ValueError(f"cut must leave earlier and later tokens among {ids.shape[1]}, got {cut}")
    warn_if_forgotten(model)
    changed = ids.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % vocabulary(model)
    with undisturbed(model):
        before, after = (logits_of(model(tokens, **inputs), tokens) for tokens in (ids, changed))
        return (before[:, :cut].double() - after[:, :cut].double()).abs().max().item()


def vocabulary(model: nn.Module) -> int:
    """How many ids the model knows: the rows of its input embedding, the first one where it does not say."""
    inner = next((m for m in model.modules() if hasattr(m, "get_input_embeddings")), None)
    tables = [inner.get_input_embeddings()] if inner is not None else []  # type: ignore[operator]
    tables += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    size = next((table.num_embeddings for table in tables if isinstance(table, nn.Embedding)), 0)
    if size < 2:
        raise ValueError(f"found no embedding of two or more ids inside {type(model).__name__}")
    return size


def logits_of(output: Any, ids: Tensor) -> Tensor:
    """The tensor of an output that has one entry per token."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    if not isinstance(output, torch.Tensor) or output.shape[:2] != ids.shape:
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ValueError(f"the model must return logits (B, N, …) for ids {tuple(ids.shape)}, got {got}")
    return output
