"""wellcond's own models."""

from __future__ import annotations

from torch import nn

from wellcond.sites.registry import Registry
from wellcond.sites.site import ModelSites, Site
from wellcond.sites.transformers import every_row, readable, real_tokens


def register(registry: Registry) -> None:
    """Enter the models and attention modules of `wellcond.models`."""
    module = "wellcond.models.crammed_bert"
    registry.model(f"{module}.CrammedBertModel")(crammed_bert)
    registry.attention(f"{module}.CrammedBertAttention", heads="heads", outputs="output")


def crammed_bert(model: nn.Module) -> ModelSites:
    """Crammed BERT: positions are a fixed code times one learned number, so nothing can be folded into them."""
    return ModelSites(
        input=Site("embeddings"),
        tokens=Site("embeddings.word_embeddings"),
        arguments=readable(model, ("input_ids", "attention_mask", "inputs_embeds")),
        mask=real_tokens,
        rows=every_row,
        ready="inputs_embeds",
        table="embeddings.word_embeddings",
    )
