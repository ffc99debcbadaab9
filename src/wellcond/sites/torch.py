"""torch.nn: the encoder and the attention that ship with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.sites.registry import Registry
from wellcond.sites.site import ModelSites, Site


def register(registry: Registry) -> None:
    """Enter ``nn.TransformerEncoder`` (also inside ``nn.Transformer``) and ``nn.MultiheadAttention``."""
    registry.model("torch.nn.modules.transformer.TransformerEncoder")(transformer_encoder)
    registry.attention(
        "torch.nn.modules.activation.MultiheadAttention", heads="num_heads", outputs="out_proj"
    )


def transformer_encoder(model: nn.Module) -> ModelSites:
    """The encoder's own input: before the fast path turns it into a nested tensor.

    Positions, if any, were added by whoever calls the encoder. Whether it is causal is decided by each call.
    """
    layers = model.get_submodule("layers")
    attention = getattr(next(iter(layers.children()), None), "self_attn", None)
    if attention is None:
        raise ValueError(
            "this nn.TransformerEncoder has no layers, or layers without self_attn, so that the order of its axes "
            "is unknown; name the module that returns the tokens: condition_(model, site=..., layout=...)"
        )
    return ModelSites(
        input=Site("", side="input", layout="NLC" if attention.batch_first else "LNC", key="src"),
        arguments=("src", "mask", "src_key_padding_mask", "is_causal"),
        mask=real_source_tokens,
        causal_call=is_causal_call,
    )


def real_source_tokens(call: Mapping[str, Any]) -> Tensor | None:
    """``src_key_padding_mask``, bool or additive, turned round: True = real."""
    padding: Tensor | None = call.get("src_key_padding_mask")
    if padding is None:
        return None
    return ~padding if padding.dtype == torch.bool else padding == 0


def is_causal_call(call: Mapping[str, Any]) -> bool:
    """Whether an encoder call says ``is_causal`` or its ``mask`` hides the later tokens."""
    attention = call.get("mask")
    return bool(call.get("is_causal")) or (attention is not None and hides_the_future(attention))


def hides_the_future(mask: Tensor) -> bool:
    """Whether an attention mask (bool, True = hidden, or additive) hides every later token from every token."""
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    above = torch.ones_like(hidden, dtype=torch.bool).triu(1)
    return bool(above.any()) and bool((hidden | ~above).all())
