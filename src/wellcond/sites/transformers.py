"""Hugging Face transformers: encoders, decoders, and the encoders of encoder-decoder models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.sites.registry import Registry
from wellcond.sites.site import ModelSites, Site

CALL = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "cache", "past_key_values")
"""What is read of a call: ``cache`` was called ``past_key_values`` before transformers 5.20."""


def register(registry: Registry) -> None:
    """Enter the models and attention modules of transformers."""
    models = "transformers.models"
    registry.model(f"{models}.bert.modeling_bert.BertModel")(bert)
    registry.model(f"{models}.electra.modeling_electra.ElectraModel")(bert)
    registry.model(
        f"{models}.roberta.modeling_roberta.RobertaModel",
        f"{models}.xlm_roberta.modeling_xlm_roberta.XLMRobertaModel",
        f"{models}.camembert.modeling_camembert.CamembertModel",
    )(roberta)
    registry.model(f"{models}.distilbert.modeling_distilbert.DistilBertModel")(distilbert)
    registry.model(f"{models}.nystromformer.modeling_nystromformer.NystromformerModel")(nystromformer)
    registry.model(f"{models}.vit.modeling_vit.ViTModel")(vit)
    registry.model(f"{models}.detr.modeling_detr.DetrEncoder")(detr_encoder)
    registry.model(f"{models}.t5.modeling_t5.T5Stack")(t5_stack)
    registry.model(f"{models}.bart.modeling_bart.BartEncoder")(bart_encoder)
    registry.model(f"{models}.gpt2.modeling_gpt2.GPT2Model")(gpt2)
    registry.model(f"{models}.opt.modeling_opt.OPTDecoder")(opt)
    registry.model(f"{models}.gpt_neox.modeling_gpt_neox.GPTNeoXModel")(gpt_neox)
    registry.model(
        f"{models}.llama.modeling_llama.LlamaModel",
        f"{models}.mistral.modeling_mistral.MistralModel",
        f"{models}.qwen2.modeling_qwen2.Qwen2Model",
        f"{models}.qwen3.modeling_qwen3.Qwen3Model",
    )(llama)

    for path, heads, outputs in ATTENTION:
        registry.attention(f"{models}.{path}", heads=heads, outputs=outputs)
    registry.attention(
        f"{models}.nystromformer.modeling_nystromformer.NystromformerSelfAttention",
        heads="num_attention_heads",
        outputs="",
        weights=False,
    )


ATTENTION = (
    ("bert.modeling_bert.BertSelfAttention", "num_attention_heads", ""),
    ("electra.modeling_electra.ElectraSelfAttention", "num_attention_heads", ""),
    ("roberta.modeling_roberta.RobertaSelfAttention", "num_attention_heads", ""),
    ("xlm_roberta.modeling_xlm_roberta.XLMRobertaSelfAttention", "num_attention_heads", ""),
    ("camembert.modeling_camembert.CamembertSelfAttention", "num_attention_heads", ""),
    ("distilbert.modeling_distilbert.DistilBertSelfAttention", "n_heads", "out_lin"),
    ("vit.modeling_vit.ViTAttention", "config.num_attention_heads", "o_proj"),
    # The layer stands for its self-attention: the same class serves as cross-attention elsewhere.
    ("detr.modeling_detr.DetrEncoderLayer", "self_attn.config.encoder_attention_heads", "self_attn.o_proj"),
    ("t5.modeling_t5.T5LayerSelfAttention", "SelfAttention.n_heads", "SelfAttention.o"),
    ("bart.modeling_bart.BartEncoderLayer", "self_attn.num_heads", "self_attn.out_proj"),
    ("gpt2.modeling_gpt2.GPT2Attention", "num_heads", "c_proj"),
    ("opt.modeling_opt.OPTAttention", "num_heads", "out_proj"),
    ("gpt_neox.modeling_gpt_neox.GPTNeoXAttention", "config.num_attention_heads", "dense"),
    ("llama.modeling_llama.LlamaAttention", "config.num_attention_heads", "o_proj"),
    ("mistral.modeling_mistral.MistralAttention", "config.num_attention_heads", "o_proj"),
    ("qwen2.modeling_qwen2.Qwen2Attention", "config.num_attention_heads", "o_proj"),
    ("qwen3.modeling_qwen3.Qwen3Attention", "config.num_attention_heads", "o_proj"),
)
"""Class below ``transformers.models``, attribute with the heads, module that receives their outputs."""


# -------------------------------------------------------------------------------------------- encoders


def bert(model: nn.Module) -> ModelSites:
    """BERT and ELECTRA, which may widen its embeddings before the first block; a decoder if configured so."""
    widens = isinstance(getattr(model, "embeddings_project", None), nn.Module)
    return ModelSites(
        input=Site("embeddings_project" if widens else "embeddings"),
        tokens=Site("embeddings.word_embeddings"),
        causal=is_decoder(model),
        arguments=readable(model, CALL),
        mask=real_tokens,
        past=cached_tokens,
        rows=given_or_counted_from_cache,
        ready="inputs_embeds",
        table="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        folds={"tokens": 0},
    )


def roberta(model: nn.Module) -> ModelSites:
    """RoBERTa numbers its positions from ``padding_idx`` + 1 and gives padding none."""
    start = int(model.get_submodule("embeddings").padding_idx) + 1  # type: ignore[arg-type]
    return ModelSites(
        input=Site("embeddings"),
        tokens=Site("embeddings.word_embeddings"),
        causal=is_decoder(model),
        arguments=readable(model, CALL),
        mask=real_tokens,
        past=cached_tokens,
        rows=RowsAfterPadding(start),
        ready="inputs_embeds",
        table="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        folds={"tokens": start},
    )


def distilbert(model: nn.Module) -> ModelSites:
    """DistilBERT: BERT without token types."""
    return ModelSites(
        input=Site("embeddings"),
        tokens=Site("embeddings.word_embeddings"),
        arguments=readable(model, CALL),
        mask=real_tokens,
        rows=given_or_counted_from_cache,
        ready="inputs_embeds",
        table="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        folds={"tokens": 0},
    )


def nystromformer(model: nn.Module) -> ModelSites:
    """Nyströmformer: BERT whose positions are numbered from 2."""
    return ModelSites(
        input=Site("embeddings"),
        tokens=Site("embeddings.word_embeddings"),
        arguments=readable(model, CALL),
        mask=real_tokens,
        rows=GivenRows(2),
        ready="inputs_embeds",
        table="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        folds={"tokens": 2},
    )


def vit(model: nn.Module) -> ModelSites:
    """ViT with its class token; patches of changing image sizes are numbered row by row at their size."""
    return ModelSites(
        input=Site("embeddings", prefix=1),
        tokens=Site("embeddings.patch_embeddings"),
        arguments=readable(model, ("attention_mask",)),
        mask=real_tokens,
        positions="embeddings.position_embeddings",
        folds={"input": 0, "tokens": 1},
    )


def detr_encoder(model: nn.Module) -> ModelSites:
    """DETR adds positions to queries and keys inside each layer: the tokens are the projected feature map."""
    return ModelSites(
        input=Site("", side="input", key="inputs_embeds"),
        arguments=readable(model, ("inputs_embeds", "attention_mask")),
        mask=real_tokens,
    )


def t5_stack(model: nn.Module) -> ModelSites | None:
    """The T5 encoder (relative positions inside attention); the decoder is causal and left alone."""
    if is_decoder(model):
        return None
    return ModelSites(
        input=Site("embed_tokens"),
        arguments=readable(model, CALL),
        mask=real_tokens,
        ready="inputs_embeds",
        table="embed_tokens",
    )


def bart_encoder(model: nn.Module) -> ModelSites:
    """The BART encoder; its positions are numbered from 2, padding included."""
    return ModelSites(
        input=Site("layernorm_embedding"),
        tokens=Site("embed_tokens"),
        arguments=readable(model, CALL),
        mask=real_tokens,
        rows=every_row,
        ready="inputs_embeds",
        table="embed_tokens",
        positions="embed_positions",
        folds={"tokens": 2},
    )


# -------------------------------------------------------------------------------------------- decoders


def gpt2(model: nn.Module) -> ModelSites:
    """GPT-2: ``drop`` returns what the first block receives."""
    return ModelSites(
        input=Site("drop"),
        tokens=Site("wte"),
        causal=True,
        arguments=readable(model, CALL),
        mask=real_tokens,
        past=cached_tokens,
        rows=given_or_counted_from_cache,
        ready="inputs_embeds",
        table="wte",
        positions="wpe",
        folds={"input": 0, "tokens": 0},
    )


def opt(model: nn.Module) -> ModelSites:
    """OPT numbers real tokens only, from 2; the tokens are taken before a projection, where there is one."""
    projects = isinstance(getattr(model, "project_in", None), nn.Module)
    return ModelSites(
        input=Site("layers.0", side="input", key="hidden_states"),
        tokens=Site("project_in" if projects else "embed_tokens"),
        causal=True,
        arguments=readable(model, CALL),
        mask=real_tokens,
        past=cached_tokens,
        rows=given_or_counted_real,
        ready=None if projects else "inputs_embeds",
        table="embed_tokens",
        positions="embed_positions",
        folds={"input": 2, "tokens": 2},
    )


def gpt_neox(model: nn.Module) -> ModelSites:
    """GPT-NeoX and Pythia: rotary positions, so the tokens are the input."""
    return rotary(model, Site("emb_dropout"), "embed_in")


def llama(model: nn.Module) -> ModelSites:
    """Llama, SmolLM, Mistral, Qwen: rotary positions, nothing between the table and the first block."""
    return rotary(model, Site("embed_tokens"), "embed_tokens")


def rotary(model: nn.Module, place: Site, table: str) -> ModelSites:
    """A decoder whose positions turn queries and keys: no place before them, no table to fold into."""
    return ModelSites(
        input=place,
        causal=True,
        arguments=readable(model, CALL),
        mask=real_tokens,
        past=cached_tokens,
        rows=given_or_counted_real,
        ready="inputs_embeds",
        table=table,
    )


# -------------------------------------------------------------------------------------- reading a call


def is_decoder(model: nn.Module) -> bool:
    """Whether the configuration makes a model of either kind causal."""
    return bool(getattr(model.config, "is_decoder", False))


def readable(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``names`` that ``model.forward`` takes, by name or among its ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in names if takes_any or name in parameters)


def real_tokens(call: Mapping[str, Any]) -> Tensor | None:
    """``attention_mask`` of the tokens in this call as ``(B, N)`` bool, True = real; None where there is none.

    Raises:
        ValueError: a mask that is not two-dimensional, from which padding cannot be told.
    """
    mask: Tensor | None = call.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"conditioning needs to know which tokens are padding: pass attention_mask of shape (batch, tokens) "
            f"with 1 = real, got {shape}; a mask per pair of tokens does not say it"
        )
    return mask.bool()[:, cached_tokens(call) :]


def cached_tokens(call: Mapping[str, Any]) -> int:
    """How many tokens a key-value cache holds before those of this call."""
    cache = call.get("cache")
    cache = call.get("past_key_values") if cache is None else cache
    if cache is None:
        return 0
    if not hasattr(cache, "get_seq_length"):
        raise TypeError(
            f"a cache of type {type(cache).__name__} does not say how many tokens it holds; use a Cache of transformers"
        )
    return int(cache.get_seq_length())


def every_row(call: Mapping[str, Any], n: int) -> Tensor | None:
    """0, 1, 2, …: padding has a position too."""
    return None


def given_rows(call: Mapping[str, Any], start: int = 0) -> Tensor | None:
    """``position_ids`` as ``(B or 1, N)`` numbered from 0, or None where the call has none."""
    ids: Tensor | None = call.get("position_ids")
    if ids is None:
        return None
    if ids.ndim > 2:
        raise ValueError(f"position_ids must be (batch, tokens), got shape {tuple(ids.shape)}")
    return ids.reshape(-1, ids.shape[-1]) - start


def given_or_counted_from_cache(call: Mapping[str, Any], n: int) -> Tensor | None:
    """The model's own numbering where padding counts: ``position_ids``, or on from the cache."""
    rows = given_rows(call)
    past = cached_tokens(call)
    if rows is not None or past == 0:
        return rows
    return torch.arange(past, past + n, device=device_of(call))[None]


def given_or_counted_real(call: Mapping[str, Any], n: int) -> Tensor | None:
    """``position_ids``, or the real tokens so far counted in ``attention_mask``; −1 for padding."""
    mask: Tensor | None = call.get("attention_mask")
    if mask is None or call.get("position_ids") is not None:
        return given_or_counted_from_cache(call, n)
    if mask.ndim != 2:
        if mask.ndim == 4:
            return given_or_counted_from_cache(call, n)
        raise ValueError(f"attention_mask must be (batch, tokens), got shape {tuple(mask.shape)}")
    past = cached_tokens(call)
    if mask.shape[-1] < past + n:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} must cover the {past} cached and {n} new tokens"
        )
    real = mask.bool().long()
    return (real.cumsum(-1) * real - 1)[:, past : past + n]


class GivenRows:
    """``position_ids`` of a model that numbers from ``start``; 0, 1, 2, … without them."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, call: Mapping[str, Any], n: int) -> Tensor | None:
        return given_rows(call, self.start)


class RowsAfterPadding:
    """RoBERTa: position_ids from ``start`` = padding_idx + 1, else the tokens that are not padding_idx counted."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, call: Mapping[str, Any], n: int) -> Tensor | None:
        ids: Tensor | None = call.get("input_ids")
        if call.get("position_ids") is not None or ids is None:
            return given_rows(call, self.start)
        real = ids.ne(self.start - 1).long()
        return (real.cumsum(-1) + cached_tokens(call)) * real - 1


def device_of(call: Mapping[str, Any]) -> torch.device | None:
    """The device of this call's tokens."""
    tokens = call.get("input_ids")
    tokens = call.get("inputs_embeds") if tokens is None else tokens
    return tokens.device if isinstance(tokens, Tensor) else None
