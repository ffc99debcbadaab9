"""Reading self-attention while it runs, fused or not, without touching what it computes.

The weights softmax(QKᵀ/√d) never exist inside a fused kernel. A ``TorchFunctionMode`` sees the call to
``scaled_dot_product_attention`` itself, takes its arguments and its result, and computes the weights beside it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from wellcond.monitor.rows import Reading, read
from wellcond.sites import AttentionKind, Site

SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}
TokenMask = Callable[[], Tensor | None]


class AttentionReader:
    """What one self-attention layer computed in one forward: a Reading of outputs and of weights, per head."""

    def __init__(self, module: nn.Module, kind: AttentionKind, token_mask: TokenMask) -> None:
        self.heads: int = attribute(module, kind.heads)
        self.kind = kind
        self.token_mask = token_mask
        self.outputs: Reading | None = None
        self.weights: Reading | None = None
        holder = module.get_submodule(kind.outputs)
        self.projection = getattr(holder, "weight", None) if kind.outputs else None
        self.side_by_side = Site(kind.outputs, side="input", layout=kind.layout)
        self.handles: list[RemovableHandle] = [
            holder.register_forward_pre_hook(self.on_projection)
            if kind.outputs
            else module.register_forward_hook(self.on_output)
        ]

    def on_projection(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.split_heads(args[0])

    def on_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.split_heads(output[0] if isinstance(output, tuple) else output)

    def split_heads(self, side_by_side: Tensor) -> None:
        """``(..., N, heads·d_head)``; not needed when the fused call showed each head already."""
        if self.outputs is None:
            side_by_side = self.side_by_side.as_tokens(side_by_side)
            per_head = side_by_side.reshape(*side_by_side.shape[:-1], self.heads, -1).movedim(-2, -3)
            self.read_outputs(per_head.flatten(0, -4))

    def read_outputs(self, per_head: Tensor) -> None:
        """``(B, heads, N, d_head)``."""
        self.outputs = read(per_head, self.mask_for(per_head))

    def read_weights(self, weights: Tensor) -> None:
        """Softmax matrices ``(B, heads, N, N)`` or ``(B·heads, N, N)``; under a mask the block of real tokens."""
        if not self.kind.weights:
            return
        if weights.ndim == 3:
            weights = weights.reshape(-1, self.heads, *weights.shape[-2:])
        mask = None if self.kind.over_channels else self.mask_for(weights)
        if mask is not None:
            # A layer may append keys of its own (nn.MultiheadAttention's bias_k): those are no padding.
            keys = F.pad(mask, (0, weights.shape[-1] - mask.shape[-1]), value=True)
            weights = torch.where(keys[..., None, :], weights, 0.0)
        self.weights = read(weights, mask)

    def read_fused(self, result: Tensor, weights: Tensor) -> None:
        """What ``scaled_dot_product_attention`` returned, and the weights it used."""
        self.read_outputs(result.mT if self.kind.over_channels else result)
        self.read_weights(weights)

    def read_multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of ``F.multi_head_attention_forward``, which keeps its heads to itself.

        Called once more with the identity as output projection, it returns them side by side.
        """
        call = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
        query: Tensor = call["query"]
        call |= {"out_proj_weight": torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)}
        call |= {
            "out_proj_bias": None,
            "training": False,
            "need_weights": True,
            "average_attn_weights": False,
        }
        side_by_side, weights = F.multi_head_attention_forward(**call)
        assert weights is not None
        self.split_heads(side_by_side.transpose(0, 1) if query.ndim == 3 else side_by_side)
        self.read_weights(weights)

    def mask_for(self, per_head: Tensor) -> Tensor | None:
        """The padding mask over heads, where the layer's tokens are the model's tokens."""
        mask = self.token_mask()
        if mask is None or mask.shape != (per_head.shape[0], per_head.shape[-2]):
            return None
        return mask[:, None, :].expand(per_head.shape[:-1])


class AttentionWatch(TorchFunctionMode):
    """Sends fused attention calls and softmaxes to the reader of the layer they happen in."""

    def __init__(self, readers: dict[nn.Module, AttentionReader]) -> None:
        super().__init__()
        self.readers = readers
        self.running: list[AttentionReader] = []
        self.handles: list[RemovableHandle] = []
        for module in readers:
            self.handles.append(module.register_forward_pre_hook(self.enter_layer))
            self.handles.append(module.register_forward_hook(self.leave_layer, always_call=True))

    def enter_layer(self, module: nn.Module, args: Any) -> None:
        self.running.append(self.readers[module])

    def leave_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.running:
            if func is F.scaled_dot_product_attention:
                self.running[-1].read_fused(result, attention_weights(*args, **(kwargs or {})))
            elif func is F.multi_head_attention_forward:
                self.running[-1].read_multi_head(args, kwargs or {})
            elif func is F.linear and len(args) > 1 and args[1] is self.running[-1].projection:
                self.running[-1].split_heads(args[0])  # the module's weights used without calling the module
            elif func in SOFTMAX and isinstance(result, Tensor) and result.ndim in (3, 4):
                self.running[-1].read_weights(result)
        return result

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self.handles + [
            handle for reader in self.readers.values() for handle in reader.handles
        ]:
            handle.remove()


def attribute(module: nn.Module, dotted: str) -> Any:
    """``module.a.b`` for ``"a.b"``."""
    return functools.reduce(getattr, dotted.split("."), module)


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(QKᵀ·scale + mask) as ``scaled_dot_product_attention`` defines it, in float32 at least, no dropout."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query.to(dtype) @ key.to(dtype).mT * factor
    if is_causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if hidden else logits + attn_mask
    return logits.softmax(-1).nan_to_num(0.0)
