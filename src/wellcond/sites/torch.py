"""torch.nn: the encoder that ships with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.sites.registry import Registry
from wellcond.sites.site import ModelSites, Site


def register(registry: Registry) -> None:
    """Enter ``nn.TransformerEncoder``."""
    registry.model("torch.nn.modules.transformer.TransformerEncoder")(transformer_encoder)


def transformer_encoder(model: nn.Module) -> ModelSites:
    """The encoder's own input: before the fast path turns it into a nested tensor."""
    batch_first = model.get_submodule("layers.0.self_attn").batch_first
    return ModelSites(
        input=Site("", side="input", layout="NLC" if batch_first else "LNC", key="src"),
        arguments=("src", "mask", "src_key_padding_mask", "is_causal"),
        mask=real_source_tokens,
    )


def real_source_tokens(call: Mapping[str, Any]) -> Tensor | None:
    """``src_key_padding_mask`` turned round (True = real); a causal call has no honest sample scope and raises."""
    attention = call.get("mask")
    if call.get("is_causal") or (attention is not None and hides_the_future(attention)):
        raise ValueError(
            "this nn.TransformerEncoder is called with a causal mask: conditioning the whole sequence would show "
            "every token the future; pass allow_leak=True if that is what you want to measure"
        )
    padding = call.get("src_key_padding_mask")
    if padding is None:
        return None
    return ~padding if padding.dtype == torch.bool else padding == 0


def hides_the_future(mask: Tensor) -> bool:
    """Whether an attention mask (bool, True = hidden, or additive) hides every later token from every token."""
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    above = torch.ones_like(hidden, dtype=torch.bool).triu(1)
    return bool(above.any()) and bool((hidden | ~above).all())
