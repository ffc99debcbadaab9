"""Crammed BERT: the encoder of Geiping and Goldstein, "Cramming" (arXiv 2212.14034), for transformers.

Source of every choice: https://github.com/JonasGeiping/cramming, ``config/arch/crammed-bert.yaml`` and
``architectures/crammed_bert.py``. What differs from there is said in ``docs/language.md``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

NOT_PREDICTED = -100
"""Label of a position that is not predicted, as everywhere in transformers."""


class CrammedBertConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Sizes of a crammed BERT; the defaults are those of the paper.

    Attributes:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: as of any BERT.
        intermediate_size: width of the feed-forward *before* gating: half of it passes through GELU and gates the other
            half, so ``intermediate_size / 2`` numbers enter the second linear map.
        max_position_embeddings: longest sequence.
        hidden_dropout_prob: after embeddings, attention and feed-forward; pretraining has none.
        attention_probs_dropout_prob: of the attention weights.
        classifier_size: width of the layer with tanh in the classification head.
        classifier_dropout: before the last layer of that head.
        initializer_range: standard deviation of linear maps and embeddings at the beginning.
        layer_norm_eps: ε of every LayerNorm.

    >>> CrammedBertConfig(num_hidden_layers=2).intermediate_size
    3072
    """

    model_type = "crammed_bert"

    vocab_size: int = 32768
    hidden_size: int = 768
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 128
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    classifier_size: int = 1024
    classifier_dropout: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True


def sinusoids(length: int, width: int) -> Tensor:
    """The sinusoidal code ``(length, width)`` float32: sin and cos of n/10000^(2i/width) in turn.

    Source: Vaswani et al., arXiv 1706.03762, section 3.5.

    >>> sinusoids(2, 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    angles = torch.outer(
        torch.arange(length, dtype=torch.float64),
        torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width)),
    )
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width].float()


class ScaledSinusoids(nn.Module):
    """Sinusoidal positions times one learned number, 1/√d at the beginning (Hua et al., arXiv 2202.10447)."""

    table: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([width**-0.5]))
        self.register_buffer("table", sinusoids(length, width), persistent=False)

    def forward(self, n: int) -> Tensor:
        """The code of the first n positions, ``(1, n, d)``.

        Raises:
            ValueError: the sequence is longer than the table.
        """
        if n > len(self.table):
            raise ValueError(
                f"a sequence of {n} tokens is longer than max_position_embeddings={len(self.table)}; cut it"
            )
        return self.scale * self.table[None, :n]


class CrammedBertEmbeddings(nn.Module):
    """Token embedding plus scaled sinusoids, normalised: what enters the first block."""

    def __init__(self, config: CrammedBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.positions = ScaledSinusoids(config.max_position_embeddings, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        words: Tensor = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        embedded: Tensor = self.dropout(self.norm(words + self.positions(words.shape[1])))
        return embedded


class CrammedBertAttention(nn.Module):
    """Multi-head self-attention without biases, by the attention function that the configuration names."""

    is_causal = False

    def __init__(self, config: CrammedBertConfig) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size={config.hidden_size} is no multiple of {config.num_attention_heads} heads"
            )
        self.config = config
        self.heads = config.num_attention_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        heads, _ = attend(
            self,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            scaling=query.shape[-1] ** -0.5,
        )
        out: Tensor = self.output(heads.reshape(x.shape))
        return out


class GatedFeedForward(nn.Module):
    """W₂(GELU(g) ⊙ v) with [v, g] = W₁x, no biases (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: CrammedBertConfig) -> None:
        super().__init__()
        if config.intermediate_size % 2:
            raise ValueError(f"intermediate_size={config.intermediate_size} is split in halves: make it even")
        self.dense_in = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.dense_out = nn.Linear(config.intermediate_size // 2, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.dense_in(x).chunk(2, dim=-1)
        out: Tensor = self.dense_out(functional.gelu(gate) * value)
        return out


class CrammedBertLayer(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """A pre-norm block: x + attention(norm(x)), then the same with the feed-forward."""

    def __init__(self, config: CrammedBertConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = CrammedBertAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = GatedFeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x


class CrammedBertPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What all heads share: configuration, attention functions, initial weights."""

    config_class = CrammedBertConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CrammedBertLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, ScaledSinusoids):
            # from_pretrained builds on the meta device, where buffers that are not saved lose their values.
            length, width = module.table.shape
            initialization.copy_(module.table, sinusoids(length, width))
            initialization.constant_(module.scale, width**-0.5)


class CrammedBertModel(CrammedBertPreTrainedModel):  # type: ignore[no-untyped-call]
    """The encoder: tokens in, normalised hidden states out.

    >>> config = CrammedBertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                            intermediate_size=32)
    >>> CrammedBertModel(config)(torch.tensor([[5, 6, 7]])).last_hidden_state.shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, config: CrammedBertConfig) -> None:
        super().__init__(config)
        self.embeddings = CrammedBertEmbeddings(config)
        self.layers = nn.ModuleList(CrammedBertLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> BaseModelOutput:
        """Hidden states ``(B, N, d)``.

        Args:
            input_ids: ``(B, N)`` int64.
            attention_mask: ``(B, N)``, 1 = real, 0 = padding; None: all are real.
            inputs_embeds: looked-up tokens ``(B, N, d)`` in place of ``input_ids``.

        Raises:
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``, or a sequence that is too long.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        x = self.embeddings(input_ids, inputs_embeds)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
        for layer in self.layers:
            x = layer(x, mask)
        return BaseModelOutput(last_hidden_state=self.final_norm(x))


class CrammedBertForMaskedLM(CrammedBertPreTrainedModel):  # type: ignore[no-untyped-call]
    """The encoder with a decoder that shares the token embedding: no bias, no transform before it.

    With labels only the positions to predict are decoded, which saves three quarters of the largest product
    ("sparse prediction"); the loss is the same as that of all positions.
    """

    _tied_weights_keys = {"decoder.weight": "encoder.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: CrammedBertConfig) -> None:
        super().__init__(config)
        self.encoder = CrammedBertModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> MaskedLMOutput:
        """Scores of tokens, and the loss if there are labels.

        Args:
            input_ids, attention_mask, inputs_embeds: see `CrammedBertModel.forward`.
            labels: ``(B, N)`` int64, the token to predict or −100.

        Returns:
            MaskedLMOutput: ``logits`` ``(B, N, vocabulary)``; with labels ``(M, vocabulary)`` of the M positions to
            predict, sequence by sequence, and ``loss``, the mean cross-entropy in nats.

        Raises:
            ValueError: no position is to be predicted.
        """
        hidden = self.encoder(input_ids, attention_mask, inputs_embeds).last_hidden_state
        if labels is None:
            return MaskedLMOutput(logits=self.decoder(hidden))
        wanted = labels != NOT_PREDICTED
        targets = labels[wanted]
        if len(targets) == 0:
            raise ValueError(f"labels of shape {tuple(labels.shape)} have no position to predict: mask some")
        logits = self.decoder(hidden[wanted])
        return MaskedLMOutput(loss=functional.cross_entropy(logits, targets), logits=logits)


class CrammedBertForSequenceClassification(CrammedBertPreTrainedModel):  # type: ignore[no-untyped-call]
    """The encoder, the mean of the real tokens, a layer with tanh, and a last layer; both have biases.

    One label (``num_labels=1``) means regression.
    """

    def __init__(self, config: CrammedBertConfig) -> None:
        super().__init__(config)
        self.encoder = CrammedBertModel(config)
        self.pooler = nn.Linear(config.hidden_size, config.classifier_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.classifier_size, config.num_labels or 2)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Logits ``(B, num_labels)``, and the loss if there are labels.

        Args:
            input_ids, attention_mask, inputs_embeds: see `CrammedBertModel.forward`.
            labels: ``(B,)``, int64 classes (cross-entropy) or, with one label, numbers (squared error).
        """
        hidden = self.encoder(input_ids, attention_mask, inputs_embeds).last_hidden_state
        logits = self.classifier(self.dropout(self.pooler(mean_of_real(hidden, attention_mask)).tanh()))
        loss = None
        if labels is not None:
            if self.config.num_labels == 1:
                loss = functional.mse_loss(logits[:, 0], labels.to(logits.dtype))
            else:
                loss = functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def mean_of_real(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean ``(B, d)`` of the real tokens of ``(B, N, d)``; the mask is ``(B, N)``, 1 = real.

    >>> mean_of_real(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
    tensor([[2.]])
    """
    if attention_mask is None:
        return hidden.mean(1)
    real = attention_mask.to(hidden.dtype)[..., None]
    mean: Tensor = torch.where(real > 0, hidden, 0.0).sum(1) / real.sum(1).clamp(min=1.0)
    return mean


def _register() -> None:
    """Let transformers' Auto classes build this model from a saved configuration."""
    kind: Any = CrammedBertConfig
    AutoConfig.register(kind.model_type, kind)
    AutoModel.register(kind, CrammedBertModel)
    AutoModelForMaskedLM.register(kind, CrammedBertForMaskedLM)
    AutoModelForSequenceClassification.register(kind, CrammedBertForSequenceClassification)


_register()
